"""Claude Code, unmodified, learns to work on small repositories."""
