"""The training step: shared prefixes, packed, and TRL's GRPOTrainer."""
