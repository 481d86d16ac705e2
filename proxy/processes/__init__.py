"""Proxy processes: one, several on one port, several on one store."""
