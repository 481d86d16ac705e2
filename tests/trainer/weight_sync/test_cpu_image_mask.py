"""The parts in which a vLLM on a CPU computes a request with images whose tokens see each other.

The kernel's own results are compared with transformers' in `tests/e2e/test_images.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.weight_sync.cpu_image_mask import cut, divided

Images = Mapping[int, list[tuple[int, int]]]


@dataclass
class Metadata:
    """The fields of vLLM's `CommonAttentionMetadata` that matter here."""

    query_start_loc: Tensor
    seq_lens: Tensor
    num_reqs: int
    block_table_tensor: Tensor
    mm_req_doc_ranges: Images | None
    causal: Any = True
    query_start_loc_cpu: Tensor | None = None


def metadata(queries: list[int], lengths: list[int], images: Images | None) -> Metadata:
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.arange(len(queries) * 2, dtype=torch.int32).view(-1, 2)
    return Metadata(starts, torch.tensor(lengths, dtype=torch.int32), len(queries), table, images)


@pytest.mark.parametrize(
    ("start", "stop", "images", "expected"),
    [
        (0, 9, [], [(0, 9, True)]),
        (0, 9, [(2, 4)], [(0, 2, True), (2, 5, False), (5, 9, True)]),
        (0, 9, [(6, 8), (0, 1)], [(0, 2, False), (2, 6, True), (6, 9, False)]),
        (0, 9, [(2, 4), (5, 6)], [(0, 2, True), (2, 5, False), (5, 7, False), (7, 9, True)]),
        (3, 9, [(2, 4)], [(3, 5, False), (5, 9, True)]),  # the prefix is in the cache
        (5, 9, [(2, 4)], [(5, 9, True)]),
        (0, 2, [(2, 4)], [(0, 2, True)]),  # the image is in a later pass
    ],
)
def test_tokens_are_cut_at_images(
    start: int, stop: int, images: list[tuple[int, int]], expected: list[tuple[int, int, bool]]
) -> None:
    assert cut(start, stop, images) == expected


def test_parts_of_a_request_share_its_cache() -> None:
    """A prompt with two images, of which 4 tokens are cached; an answer; a prompt of text."""
    batch = metadata([10, 1, 3], [14, 20, 3], {0: [(2, 5), (9, 11)], 1: [(3, 6)], 2: []})
    parts = divided(batch)
    assert parts.num_reqs == 6
    assert parts.query_start_loc.tolist() == [0, 2, 5, 8, 10, 11, 14]
    assert parts.query_start_loc_cpu.tolist() == parts.query_start_loc.tolist()
    assert parts.seq_lens.tolist() == [6, 9, 12, 14, 20, 3]
    assert parts.causal.tolist() == [0, 1, 0, 1, 1, 1]
    assert parts.causal.dtype == torch.int32  # the kernel takes no other
    assert parts.block_table_tensor.tolist() == [[0, 1]] * 4 + [[2, 3], [4, 5]]


@pytest.mark.parametrize("images", [None, {}, {0: [(2, 5)], 1: []}])
def test_batch_without_image_tokens_stays_as_it_is(images: Images | None) -> None:
    batch = metadata([1, 3], [14, 3], images)
    assert divided(batch) is batch
