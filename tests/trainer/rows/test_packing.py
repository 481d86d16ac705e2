"""Micro-batches hold each trained token once, and too large trees are cut at the lowest cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.rollouts import group
from trainer.batch import Batch, build_batch
from trainer.rows.packing import common_prefix, cut, pack


def make_batch(seed: int, groups: int = 3, size: int = 5, segments: int = 4) -> Batch:
    rng = np.random.default_rng(seed)
    return build_batch([group(rng, f"g{i}", size=size, segments=segments) for i in range(groups)])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    max_tokens=st.integers(10, 400),
    fill_tokens=st.none() | st.integers(10, 400),
    share=st.booleans(),
    ranks=st.integers(1, 3),
)
def test_each_trained_token_is_predicted_once_by_the_token_before_it_on_its_path(
    seed: int, max_tokens: int, fill_tokens: int | None, share: bool, ranks: int
) -> None:
    batch = make_batch(seed)
    micros = pack(
        batch,
        max_tokens=max_tokens,
        fill_tokens=fill_tokens,
        share_prefixes=share,
        multiple_of=ranks,
    )
    assert len(micros) % ranks == 0
    predicted = torch.cat([micro.targets for micro in micros])
    assert sorted(predicted.tolist()) == list(range(batch.num_tokens))
    for micro in micros:
        ends = micro.layout.ends
        for target, at in zip(micro.targets.tolist(), micro.predictors.tolist(), strict=True):
            seen = torch.arange(at + 1)[ends[: at + 1] > at]
            position = int(batch.position[target])
            past = batch.sequences[int(batch.sequence[target])][:position]
            assert micro.ids[seen].tolist() == past.tolist()
            assert micro.positions[seen].tolist() == list(range(position))


def test_micro_batches_are_filled_evenly_up_to_the_limit() -> None:
    batch = make_batch(1, groups=8)
    longest = max(len(ids) for ids in batch.sequences)
    small = pack(batch, max_tokens=10 * longest, fill_tokens=2 * longest)
    large = pack(batch, max_tokens=10 * longest)
    assert len(small) > len(large)
    assert max(len(micro.ids) for micro in small) <= 2 * longest
    assert min(len(micro.ids) for micro in small) >= longest / 2


def test_sequences_with_a_common_prefix_exceed_the_fill_limit_together() -> None:
    batch = make_batch(2, groups=1)
    (whole,) = pack(batch, max_tokens=10_000, share_prefixes=True)
    (same,) = pack(batch, max_tokens=10_000, fill_tokens=1, share_prefixes=True)
    assert torch.equal(same.ids, whole.ids)


def test_sequence_longer_than_a_micro_batch_adds_no_empty_micro_batch() -> None:
    batch = make_batch(3, groups=1, size=1, segments=1)
    (micro,) = pack(batch, max_tokens=len(batch.sequences[0]) // 3)
    assert len(micro.ids) == len(batch.sequences[0])


def tokens(walk: list[np.ndarray], start: int, stop: int) -> int:
    """Number of tokens in the radix tree of `walk[start:stop]`."""
    part = walk[start:stop]
    return sum(map(len, part)) - sum(common_prefix(a, b) for a, b in pairwise(part))


def ways(count: int) -> list[list[int]]:
    """The bounds of the parts, for every way to cut this number of sequences."""
    return [
        [0, *(i for i in range(1, count) if bits >> i & 1), count] for bits in range(0, 2**count, 2)
    ]


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=7),
    max_tokens=st.integers(1, 25),
)
def test_tree_is_cut_where_the_fewest_tokens_are_repeated(
    ids: list[list[int]], max_tokens: int
) -> None:
    walk = [np.array(each) for each in sorted(ids)]
    shared = [0, *(common_prefix(a, b) for a, b in pairwise(walk))]
    parts = cut(np.array([len(each) for each in walk]), np.array(shared), max_tokens)
    assert [size for *_, size in parts] == [tokens(walk, start, stop) for start, stop, _ in parts]
    assert [start for start, _, _ in parts] + [len(walk)] == [0, *(stop for _, stop, _ in parts)]
    allowed = [
        bounds
        for bounds in ways(len(walk))
        if all(tokens(walk, a, b) <= max_tokens or b == a + 1 for a, b in pairwise(bounds))
    ]
    best = min(
        (sum(tokens(walk, a, b) for a, b in pairwise(bounds)), len(bounds)) for bounds in allowed
    )
    assert (sum(size for *_, size in parts), len(parts) + 1) == best
    assert all(size <= max_tokens or stop == start + 1 for start, stop, size in parts)


@pytest.mark.parametrize("max_tokens", [130, 150])
def test_cut_is_between_two_prefixes_even_if_a_part_is_not_full(
    max_tokens: int,
) -> None:
    """Three sequences share 60 tokens, two others 40, and all of them 10."""
    lengths, shared = np.array([70, 70, 70, 60, 60]), np.array([0, 60, 60, 10, 40])
    assert cut(lengths, shared, max_tokens) == [(0, 3, 90), (3, 5, 80)]
