"""What the agent loop can do without, each loaded when a configuration has its key."""
