"""Agents to train, and the starter model they start from. No package imports anything of it."""
