"""The layout of weights in a segment of shared memory, and the digest of what it holds.

head, HEAD_BYTES │ tensors, each at a multiple of ALIGN_BYTES │ index
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

ALIGN_BYTES = 64  # a cache line; also enough for any type's own alignment
HEAD_BYTES = 16


def segment_head(end: int, index: bytes) -> bytes:
    """A segment's first HEAD_BYTES: where its index begins, and its length."""
    return end.to_bytes(8, "little") + len(index).to_bytes(8, "little")


def aligned(size_bytes: int) -> int:
    """The next place where a tensor of any type may begin."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def new_digest() -> xxhash.xxh3_128:
    """XXH3 (128 bit). It detects faults and does not protect against an attacker. It is as fast as
    reading memory; a cryptographic hash would take several times as long as the copy."""
    return xxhash.xxh3_128()


def title(name: str, dtype: str, shape: Sequence[int]) -> bytes:
    """What a digest covers of a tensor besides its bytes."""
    return f"{name} torch.{dtype} {tuple(shape)} ".encode()
