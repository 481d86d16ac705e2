"""The commands of `agentic-train`, one module each."""
