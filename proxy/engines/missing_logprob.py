"""How vLLM writes that it has no log-probability. Imports nothing: vLLM's process loads it, too."""

MISSING_LOGPROB = -9999.0
"""vLLM's value for NaN, minus infinity, or a token that is not in its table."""
