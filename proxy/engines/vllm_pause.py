"""The routes by which a vLLM is paused for new weights, and forgets what it computed with old ones.

Keys and values are in the KV cache, and in a host tier if the engine has one
(`--kv-offloading-size`), from which vLLM takes them for the next prompt with the same tokens,
whatever weights it has by then. Both are reset while the engine is paused, and before it gets a new
weight, because it may have to be resumed in between (see LOADS).
"""

from __future__ import annotations

PAUSE = "/sleep?level=0&mode=keep"
"""Freezes running requests, and frees no memory. vLLM's `/pause?mode=keep` does the same and then
waits for 20 ms."""
RESUME = "/wake_up?tags=scheduling"
RESET_CACHES = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""Without `reset_external`, vLLM 0.32 keeps the host tier and reports success."""
LOADS = "waiting for remote KV transfer"
"""In vLLM's refusal while a request waits for keys and values from the host tier. A paused engine
never ends that wait, so it is resumed, with its old weights, before the next attempt."""
LOAD_S = 0.05
"""Seconds until the next attempt: about the time to load 12,000 tokens of an 8B model."""
