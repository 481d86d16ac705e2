"""The models in training: forward pass, backward pass and optimizer step, in one process or
sharded."""
