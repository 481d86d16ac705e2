"""Attention by runs, and the mask for FlexAttention, compared with a dense mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from tests.trainer.rollouts import group
from trainer.batch import build_batch
from trainer.policy import blocks, mask
from trainer.policy.attention import attend, attend_by_runs
from trainer.policy.flex import flex_attend
from trainer.policy.mask import AttentionMask
from trainer.rows.packing import Layout, pack


def layout_of(seed: int, *, share: bool) -> Layout:
    rng = np.random.default_rng(seed)
    batch = build_batch([group(rng, f"g{i}", size=3, segments=6) for i in range(2)])
    (micro,) = pack(batch, max_tokens=10_000, share_prefixes=share)
    return micro.layout


def inputs(tokens: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Four query heads, two key and value heads; `sizes`: head sizes of queries and of values."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, tokens, sizes[0]), (1, 2, tokens, sizes[0]), (1, 2, tokens, sizes[1]))
    query, key, value = (
        torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes
    )
    return query, key, value


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with a dense mask, path by path: nothing of `Layout` but `ends` is used."""
    at = torch.arange(len(layout.ends))
    mask = (at[None, :] <= at[:, None]) & (at[:, None] < layout.ends[None, :])
    if window is not None:  # the number of tokens that a token sees is its depth + 1
        depth = mask.sum(1)
        mask &= depth[:, None] - depth[None, :] < window
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ value
    column = sinks.view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def test_each_run_holds_tokens_that_are_followed_by_the_same_tokens() -> None:
    layout = Layout(torch.tensor([5, 5, 3, 5, 5]), longest=4)
    assert layout.runs == ((0, 2, 5), (2, 3, 3), (3, 5, 5))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    share=st.booleans(),
    sizes=st.sampled_from([(8, 8), (12, 8), (8, 16)]),
)
def test_output_and_gradients_equal_those_of_a_dense_mask(
    seed: int, share: bool, sizes: tuple[int, int]
) -> None:
    layout = layout_of(seed, share=share)
    ours, theirs = (inputs(len(layout.ends), sizes) for _ in range(2))
    scale = sizes[0] ** -0.5
    got, expected = attend_by_runs(*ours, layout, scale), dense(*theirs, layout)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    for out in (got, expected):
        (out * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    share=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5, 11]),
    softcap=st.sampled_from([None, 0.7]),
    with_sinks=st.booleans(),
    block=st.sampled_from([3, 128]),
)
def test_windows_soft_caps_and_sinks_equal_a_dense_mask(
    seed: int,
    share: bool,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    block: int,
) -> None:
    layout = layout_of(seed, share=share)
    ours, theirs = (inputs(len(layout.ends), (8, 8)) for _ in range(2))
    sinks = [torch.linspace(-2, 2, 4, requires_grad=True) if with_sinks else None for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "SMALLEST_BLOCK", block)
        patch.setattr(blocks, "LARGEST_BLOCK", block)
        blocks.blocks_of.cache_clear()
        got = attend(*ours, AttentionMask(layout, window), 8**-0.5, softcap=softcap, sinks=sinks[0])
    expected = dense(*theirs, layout, window=window, softcap=softcap, sinks=sinks[1])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    for out in (got, expected):
        (out * weights).sum().backward()
    for a, b in zip((*ours, sinks[0]), (*theirs, sinks[1]), strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 4}, {"softcap": 0.7}, {"sinks": True}, {"window": 6, "sinks": True}],
    ids=["plain", "window", "soft cap", "sinks", "window and sinks"],
)
def test_flex_attention_equals_the_dense_mask(share: bool, options: dict[str, Any]) -> None:
    """FlexAttention runs uncompiled on CPU, and only its forward pass."""
    layout = layout_of(10, share=share)
    query, key, value = (x.detach() for x in inputs(len(layout.ends), (8, 8)))
    window, softcap = options.get("window"), options.get("softcap")
    sinks = torch.linspace(-2, 2, 4) if "sinks" in options else None
    attended = AttentionMask(layout, window)
    got = flex_attend(query, key, value, attended, 8**-0.5, softcap=softcap, sinks=sinks)
    expected = dense(query, key, value, layout, window=window, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**20), window=st.sampled_from([None, 1, 3, 9, 40]), share=st.booleans())
def test_block_mask_shows_what_every_pair_of_tokens_shows(
    seed: int, window: int | None, share: bool
) -> None:
    """Built from small blocks, and compared with FlexAttention's own look at every pair."""
    layout = layout_of(seed, share=share)
    count = len(layout.ends)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask, "BLOCK", 4)
        mask.block_mask.cache_clear()
        built = mask.block_mask(layout, window)
    mask.block_mask.cache_clear()
    whole = create_block_mask(built.mask_mod, None, None, count, count, "cpu", BLOCK_SIZE=4)
    ours, theirs = (each.to_dense()[0, 0].bool() for each in (built, whole))
    assert not (theirs & ~ours).any()
    pairs = create_mask(built.mask_mod, None, None, count, count, "cpu")[0, 0]
    assert built.full_kv_num_blocks is not None
    assert built.full_kv_indices is not None
    for row, (number, listed) in enumerate(
        zip(built.full_kv_num_blocks[0, 0], built.full_kv_indices[0, 0], strict=True)
    ):
        for column in listed[:number].tolist():
            assert pairs[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].all()
