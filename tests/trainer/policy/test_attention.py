"""Attention by runs, and the mask for FlexAttention, compared with a dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from tests.trainer.rollouts import group
from trainer.batch import build_batch
from trainer.packing import pack
from trainer.policy.attention import Layout, attend_by_runs


def layout_of(seed: int, *, share: bool) -> Layout:
    rng = np.random.default_rng(seed)
    batch = build_batch([group(rng, f"g{i}", size=3, segments=6) for i in range(2)])
    (micro,) = pack(batch, max_tokens=10_000, share_prefixes=share)
    return micro.layout


def inputs(tokens: int, sizes: tuple[int, int]) -> list[Tensor]:
    """Four query heads, two key and value heads; `sizes`: head sizes of queries and of values."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, tokens, sizes[0]), (1, 2, tokens, sizes[0]), (1, 2, tokens, sizes[1]))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    at = torch.arange(len(layout.ends))
    mask = (at[None, :] <= at[:, None]) & (at[:, None] < layout.ends[None, :])
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


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
    got, expected = attend_by_runs(*ours, layout, None), dense(*theirs, layout)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(expected)
    for out in (got, expected):
        (out * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("share", [False, True], ids=["packed", "tree"])
def test_flex_attention_mask_equals_the_dense_mask(share: bool) -> None:
    """FlexAttention runs uncompiled on CPU, and only its forward pass."""
    layout = layout_of(10, share=share)
    parts = [x.detach() for x in inputs(len(layout.ends), (8, 8))]
    flex = flex_attention(*parts, block_mask=layout.block_mask, enable_gqa=True)
    torch.testing.assert_close(flex, dense(*parts, layout), atol=1e-5, rtol=1e-5)
