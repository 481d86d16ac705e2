"""How a run's configuration is read from its sources, and its reference page."""
