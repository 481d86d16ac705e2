"""Tricks by which an agent would leave its wall, or get a reward that it did not earn."""
