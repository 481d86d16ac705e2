"""One trial's settings, credit, outcome, continuation and folders."""
