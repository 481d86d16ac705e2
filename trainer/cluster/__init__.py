"""The places where a run's processes can be: this machine or a Ray cluster."""
