"""What a vLLM server's `/metrics` say about its KV cache and its load.

Invariant: a metric that is missing, as in another version of vLLM, is left out; it is never 0.
"""

from __future__ import annotations

import re
from typing import Any

METRICS = "/metrics"
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
"""One line per data-parallel rank."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_NUMBER = r"\d{1,18}(?:\.\d{1,20})?(?:e[-+]?\d{1,2})?"
_SAMPLE = re.compile(rf"^vllm:(\w+?)(?:_total)?(?:\{{.*\}})? ({_NUMBER})$", re.MULTILINE)
_QUEUED, _USED = "num_requests_waiting", "kv_cache_usage_perc"
_ASKED, _HIT = "prefix_cache_queries", "prefix_cache_hits"


def cache_tokens(metrics: str) -> int | None:
    """The number of tokens that the KV caches of all ranks hold; None if the metrics lack it."""
    tokens = 0
    for line in _CACHE_CONFIG.findall(metrics):
        labels = dict(_LABEL.findall(line))
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if blocks.isdigit() and size.isdigit():
            tokens += int(blocks) * int(size)
    return tokens or None


def load_details(metrics: str) -> dict[str, Any]:
    """The load of all ranks together, for `EngineInfo.details`.

    Example: {"queued": 3, "cache_used": 0.42, "cache_hits": 0.87}: calls that wait in the engine,
    the used share of the KV cache, and the share of prompt tokens that were found in it since the
    engine's start.
    """
    found: dict[str, list[float]] = {name: [] for name in (_QUEUED, _USED, _ASKED, _HIT)}
    for name, value in _SAMPLE.findall(metrics):
        if name in found:
            found[name].append(float(value))
    details: dict[str, Any] = {}
    if found[_QUEUED]:
        details["queued"] = int(sum(found[_QUEUED]))
    if found[_USED]:
        details["cache_used"] = round(sum(found[_USED]) / len(found[_USED]), 3)
    if sum(found[_ASKED]) > 0:
        details["cache_hits"] = round(sum(found[_HIT]) / sum(found[_ASKED]), 3)
    return details
