"""The training step alone: prefixes shared, packed, and TRL's GRPOTrainer (make bench-train)."""
