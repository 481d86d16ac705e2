"""The unmodified mini-swe-agent from PyPI learns small shell tasks, each trial in its own
folder."""
