"""A run's folder, log, metrics and progress, and the events that end it."""
