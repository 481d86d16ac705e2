"""What a vLLM server's `/metrics` say about its KV cache and its load.

Invariant: a metric that is missing, as in another version of vLLM, is left out; it is never 0.
"""

from __future__ import annotations

import re
from typing import Any

METRICS = "/metrics"
_CACHE = "cache_config_info"
_QUEUED, _USED = "num_requests_waiting", "kv_cache_usage_perc"
_ASKED, _HIT, _HIT_HOST = "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_hits"
_LOAD = (_QUEUED, _USED, _ASKED, _HIT, _HIT_HOST)
_STORED, _CHUNKS = "kv_offload_store_bytes", "kv_offload_cpu_allocation_size_sum"
_STORING = "kv_offload_cpu_cache_write_usage_perc"
_HOST = (_STORED, _CHUNKS, _STORING)
_NUMBER = r"\d{1,18}(?:\.\d{1,20})?(?:e[-+]?\d{1,2})?"
SAMPLE = re.compile(
    rf"\nvllm:({'|'.join((_CACHE, *_LOAD, *_HOST))})(?:_total)?(?:\{{(.*)\}})? ({_NUMBER})$",
    re.MULTILINE,
)
"""Name, labels and value of the samples that are used, one per data-parallel rank. A page has
thousands of others. The line break before a sample, instead of `^`, makes the search ten times
faster, because the pattern then begins with constant text."""
_LABEL = re.compile(r'\b(num_gpu_blocks|block_size|kv_offloading_size)="(\d{1,18}(?:\.\d{1,20})?)"')
GIB = 2**30


def cache_tokens(metrics: str) -> int | None:
    """The number of tokens that the KV caches of all ranks hold, or their host tiers, if these hold
    more (they contain what is in the KV caches, too); None if the metrics lack it."""
    tokens, host_bytes, block = 0, 0.0, 0
    for name, labels, _ in _samples(metrics):
        sizes = dict(_LABEL.findall(labels)) if name == _CACHE else {}
        if sizes.keys() >= {"num_gpu_blocks", "block_size"}:
            block = int(sizes["block_size"])
            tokens += int(sizes["num_gpu_blocks"]) * block
            host_bytes += float(sizes.get("kv_offloading_size", 0)) * GIB
    return max(tokens, _host_tokens(metrics, host_bytes, block)) or None


def _host_tokens(metrics: str, tier_bytes: float, block_tokens: int) -> int:
    """The number of tokens that host tiers of this size hold; 0 before the first block was stored.

    vLLM reports their size in bytes only. What a block takes follows from what was stored: the
    bytes, those of stores that have not ended (a share of the tier), and the number of blocks.
    """
    if not tier_bytes:
        return 0
    sums = dict.fromkeys(_HOST, 0.0)
    ranks = 0
    for name, _, value in _samples(metrics):
        if name in sums:
            sums[name] += float(value)
            ranks += name == _STORING
    if not sums[_STORED] or not sums[_CHUNKS]:
        return 0
    storing_bytes = sums[_STORING] / max(1, ranks) * tier_bytes
    block_bytes = (sums[_STORED] + storing_bytes) / sums[_CHUNKS]
    return int(tier_bytes / block_bytes) * block_tokens


def load_details(metrics: str) -> dict[str, Any]:
    """The load of all ranks together, for `EngineInfo.details`.

    Example: {"queued": 3, "cache_used": 0.42, "cache_hits": 0.87}: calls that wait in the engine,
    the used share of the KV cache, and the share of prompt tokens that were found in it, or in a
    host tier, since the engine's start.
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
        details["cache_hits"] = round(sum(found[_HIT] + found[_HIT_HOST]) / sum(found[_ASKED]), 3)
    return details


def _samples(metrics: str) -> list[tuple[str, str, str]]:
    return SAMPLE.findall("\n" + metrics)
