"""What a vLLM server's `/metrics` say about its KV cache and its load.

Invariant: a metric that is missing, as in another version of vLLM, is left out; it is never 0.
"""

from __future__ import annotations

import re
from typing import Any

METRICS = "/metrics"
_CACHE = "cache_config_info"
_QUEUED, _USED = "num_requests_waiting", "kv_cache_usage_perc"
_ASKED, _HIT = "prefix_cache_queries", "prefix_cache_hits"
_LOAD = (_QUEUED, _USED, _ASKED, _HIT)
_NUMBER = r"\d{1,18}(?:\.\d{1,20})?(?:e[-+]?\d{1,2})?"
SAMPLE = re.compile(
    rf"\nvllm:({'|'.join((_CACHE, *_LOAD))})(?:_total)?(?:\{{(.*)\}})? ({_NUMBER})$", re.MULTILINE
)
"""Name, labels and value of the samples that are used, one per data-parallel rank. A page has
thousands of others. The line break before a sample, instead of `^`, makes the search ten times
faster, because the pattern then begins with constant text."""
_SIZE = re.compile(r'\b(num_gpu_blocks|block_size)="(\d{1,18})"')


def cache_tokens(metrics: str) -> int | None:
    """The number of tokens that the KV caches of all ranks hold; None if the metrics lack it."""
    tokens = 0
    for name, labels, _ in _samples(metrics):
        sizes = dict(_SIZE.findall(labels)) if name == _CACHE else {}
        if len(sizes) == 2:
            tokens += int(sizes["num_gpu_blocks"]) * int(sizes["block_size"])
    return tokens or None


def load_details(metrics: str) -> dict[str, Any]:
    """The load of all ranks together, for `EngineInfo.details`.

    Example: {"queued": 3, "cache_used": 0.42, "cache_hits": 0.87}: calls that wait in the engine,
    the used share of the KV cache, and the share of prompt tokens that were found in it since the
    engine's start.
    """
    found: dict[str, list[float]] = {name: [] for name in _LOAD}
    for name, _, value in _samples(metrics):
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


def _samples(metrics: str) -> list[tuple[str, str, str]]:
    return SAMPLE.findall("\n" + metrics)
