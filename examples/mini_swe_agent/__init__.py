"""The unmodified mini-swe-agent from PyPI learns small shell tasks, each in a folder of its own."""
