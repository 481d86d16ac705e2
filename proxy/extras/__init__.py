"""What the proxy can do without: one folder for each extra, loaded when the configuration names it
(`proxy.extra_registry`).
"""
