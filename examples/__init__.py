"""Agents to train, and the starter model for them. No package imports these modules."""
