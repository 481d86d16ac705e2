"""Engines behind a firewall: workers connect out to the proxy and sample for it."""
