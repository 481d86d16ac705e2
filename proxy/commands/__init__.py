"""The commands of `agentic-proxy` other than `serve`."""
