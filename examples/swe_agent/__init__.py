"""SWE-agent, unmodified, learns to work on small repositories."""
