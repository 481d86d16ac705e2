"""The proxy's processes: a single one, or several on one port."""
