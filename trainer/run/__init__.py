"""A run: its services, folder, log, metrics and the ways that it ends."""
