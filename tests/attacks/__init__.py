"""Attacks on a proxy process: hostile HTTP, kills, soaks. `make test` runs short ones."""
