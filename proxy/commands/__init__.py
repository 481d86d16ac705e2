"""The commands of `agentic-proxy` besides `serve`."""
