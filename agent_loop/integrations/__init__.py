"""Plug-ins that run this package's trials inside other trainers."""
