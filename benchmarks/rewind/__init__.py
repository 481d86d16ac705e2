"""A task with a sparse reward: mini-swe-agent walks through a house of ten rooms."""
