"""Whether agents can be run again to each of their turns: varied trials, and the measurement."""
