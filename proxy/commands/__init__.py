"""What `agentic-proxy` does beside serving."""
