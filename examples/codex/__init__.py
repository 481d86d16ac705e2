"""Codex, unmodified, learns to work on small repositories."""
