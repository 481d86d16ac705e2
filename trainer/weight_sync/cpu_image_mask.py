"""Makes a vLLM on CPU compute models in which the tokens of an image see each other (Gemma 3).

vLLM's attention on a CPU has no such mask, computes these tokens causally, and does not say so. Its
kernel computes each request causally or not, though, on the keys and values that the request has
in the cache. Here a request is given to it in parts, which share their cache: an image, which sees
what is before it and all of itself, and the text between images, which is causal.

Invariant: each token sees exactly the tokens that vLLM's own backends with the mask show it. An
image is never cut into several passes; a prefix that ends in an image has its keys and values from
a pass over the whole of it.

Runs inside vLLM's processes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


@functools.cache
def install() -> None:
    """Changes vLLM's attention in this process if its platform is a CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder as Builder

    Builder.build = _in_parts(Builder.build)
    CpuPlatform.check_and_update_config = classmethod(
        _with_whole_images(CpuPlatform.check_and_update_config.__func__)
    )


def _with_whole_images(check: Any) -> Any:
    def with_whole_images(platform: Any, config: Any) -> None:
        model = config.model_config
        if model is not None and model.is_mm_prefix_lm:  # as vLLM's platform for CUDA
            config.scheduler_config.disable_chunked_mm_input = True
        check(platform, config)

    return with_whole_images


def _in_parts(build: Any) -> Any:
    def in_parts(
        builder: Any, common_prefix_len: int, common: Any, *more: Any, **named: Any
    ) -> Any:
        return build(builder, common_prefix_len, divided(common), *more, **named)

    return in_parts


def divided(common: Any) -> Any:
    """The batch's metadata (vLLM's `CommonAttentionMetadata`) with a row for each part of a request
    that computes image tokens; the same if none does."""
    images = common.mm_req_doc_ranges
    if not images:
        return common
    starts = common.query_start_loc.tolist()
    parts: list[tuple[int, int, int, bool]] = []
    """Row, length of its cache, start of its queries, and whether it is causal."""
    for row, length in enumerate(common.seq_lens[: common.num_reqs].tolist()):
        before = length - (starts[row + 1] - starts[row])
        for start, stop, causal in cut(before, length, images.get(row, ())):
            parts.append((row, stop, starts[row] + start - before, causal))
    if all(causal for *_, causal in parts):
        return common
    rows, lengths, queries, kinds = map(list, zip(*parts, strict=True))
    like = common.seq_lens
    query_start_loc = common.query_start_loc.new_tensor([*queries, starts[common.num_reqs]])
    return replace(
        common,
        num_reqs=len(parts),
        seq_lens=like.new_tensor(lengths),
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        block_table_tensor=common.block_table_tensor[rows],
        causal=like.new_tensor(kinds),  # int32, as the kernel takes it
    )


def cut(start: int, stop: int, images: Any) -> list[tuple[int, int, bool]]:
    """The tokens from `start` to before `stop` as `(start, stop, causal)`, cut at the images, each
    a first and a last token."""
    parts: list[tuple[int, int, bool]] = []
    for first, last in sorted(images):
        begin, end = max(first, start), min(last + 1, stop)
        if begin >= end:
            continue
        if start < begin:
            parts.append((start, begin, True))
        parts.append((begin, end, False))
        start = end
    if start < stop:
        parts.append((start, stop, True))
    return parts
