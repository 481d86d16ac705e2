"""What the trainer can do without, each loaded when a setting names it."""
