"""Prices, stock and reservations of a small shop."""
