"""Linear layers over trees compared with each path alone, forward and gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from tests.trainer.rollouts import group, rollout
from trainer.batch import build_batch
from trainer.extras.hybrids import delta_rule
from trainer.extras.hybrids.delta_rule import tree_convolution, tree_delta_rule
from trainer.policy import proof_on_copy
from trainer.policy.shrink import shrunk
from trainer.rows.packing import Layout, pack

CHUNK = qwen3_5.torch_chunk_gated_delta_rule.__wrapped__
RECURRENT = qwen3_5.torch_recurrent_gated_delta_rule.__wrapped__


def layout_of(seed: int, *, share: bool, longest: int = 12) -> Layout:
    rng = np.random.default_rng(seed)
    groups = [group(rng, f"g{i}", size=3, segments=5) for i in range(2)]
    long = rollout(rng, "long", segments=3, longest=longest, group="g0")
    groups[0] = replace(groups[0], rollouts=[*groups[0].rollouts, long])
    (micro,) = pack(build_batch(groups), max_tokens=100_000, share_prefixes=share)
    return micro.layout


def paths(layout: Layout) -> Iterator[tuple[Tensor, slice]]:
    """Each run's whole path, and the run's own part of it."""
    for number, (start, stop, _) in enumerate(layout.runs):
        path = torch.cat([layout.path(number), torch.arange(start, stop)])
        yield path, slice(len(path) - (stop - start), None)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), share=st.booleans())
def test_rule_on_a_tree_equals_the_recurrence_along_each_path(seed: int, share: bool) -> None:
    """The longest run is cut into several of the kernel's chunks of 64 tokens."""
    layout = layout_of(seed, share=share, longest=150)
    tokens = len(layout.ends)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (1, tokens, 2, 8),
        (1, tokens, 2, 8),
        (1, tokens, 2, 6),
        (1, tokens, 2),
        (1, tokens, 2),
    )
    raw = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]

    def row() -> list[Tensor]:
        query, key, value, decay, beta = raw
        return [query, key, value, -0.1 * torch.nn.functional.softplus(decay), beta.sigmoid()]

    query, key, value, decay, beta = row()
    got, _ = tree_delta_rule(
        CHUNK, query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True, layout=layout
    )
    expected = []
    for path, own in paths(layout):
        q, k, v, g, b = (each[:, path] for each in row())
        out, _ = RECURRENT(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)
        expected.append(out[:, own])
    whole = torch.cat(expected, 1)
    torch.testing.assert_close(got, whole, atol=2e-6, rtol=1e-5)
    weights = torch.randn(whole.shape, generator=generator)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), raw) for out in (got, whole))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * float(b.abs().max()), rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**20), share=st.booleans(), width=st.integers(1, 6))
def test_convolution_on_a_tree_equals_that_of_each_path(seed: int, share: bool, width: int) -> None:
    layout = layout_of(seed, share=share)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn((1, 3, len(layout.ends)), generator=generator, requires_grad=True)
    weight = torch.randn((3, width), generator=generator, requires_grad=True)
    bias = torch.randn(3, generator=generator, requires_grad=True)
    got = tree_convolution(inputs, weight, bias, activation="silu", layout=layout)
    whole = torch.cat(
        [
            silu(conv1d(pad(inputs[:, :, path], (width - 1, 0)), weight[:, None], bias, groups=3))[
                :, :, own
            ]
            for path, own in paths(layout)
        ],
        2,
    )
    torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)
    weights = torch.randn(whole.shape, generator=generator)
    trained = (inputs, weight, bias)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), trained) for out in (got, whole))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("part", ["state", "window"])
def test_branch_that_does_not_continue_its_prefix_is_found(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch begins with empty states."""

    def flat(layout: Layout | None) -> Layout:
        assert layout is not None
        starts = [run[0] for run in layout.runs]
        ends = torch.tensor([*starts[1:], len(layout.ends)])
        own = torch.bucketize(torch.arange(len(layout.ends)), ends, right=True)
        return Layout(ends[own], layout.longest)

    name = {"state": "tree_delta_rule", "window": "tree_convolution"}[part]
    real = getattr(delta_rule, name)

    def empty(*args: Any, layout: Layout | None = None, **options: Any) -> Any:
        return real(*args, layout=flat(layout), **options)

    monkeypatch.setattr(delta_rule, name, empty)
    found = proof_on_copy.find_differences(shrunk(CONFIG_MAPPING["qwen3_5_text"]())).whole
    assert found is not None
    assert found.startswith("layer 0 (linear_attention) differs")
    assert found.endswith("as a tree")


def test_levels_hold_the_runs_of_each_depth() -> None:
    """[5 6 7] and [5 6 8 9], then [1 2] alone."""
    layout = Layout(torch.tensor([5, 5, 3, 5, 5, 7, 7]), longest=4)
    assert delta_rule._levels(layout) == [[0, 3], [1, 2]]
    assert delta_rule._before(layout).tolist() == [7, 0, 1, 1, 3, 7, 5, 7]


def test_fla_computes_all_runs_of_a_level_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the kernel gets the runs of a level in one row, with their bounds and states."""
    calls: list[dict[str, Any]] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(options | {"tokens": q.shape[1]})
        return delta_rule._each(CHUNK, q, k, v, **options)

    layout = Layout(torch.tensor([5, 5, 3, 5, 5, 7, 7]), longest=4)
    q, k = torch.randn(2, 1, 7, 2, 4)
    gate = torch.rand(1, 7, 2)
    options: dict[str, Any] = {"g": -gate, "beta": gate, "layout": layout}
    expected, _ = tree_delta_rule(CHUNK, q, k, q, **options)
    got = delta_rule.over_levels(kernel, q, k, q, **options)
    torch.testing.assert_close(got, expected)
    assert [call["tokens"] for call in calls] == [4, 3]
    assert [call["bounds"] for call in calls] == [[0, 2, 4], [0, 1, 3]]
    assert calls[0]["initial_state"] is None
    assert calls[1]["initial_state"].shape == (2, 2, 4, 4)


def test_stretches_of_a_run_are_computed_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    row = [torch.randn(1, 200, 2, 16, requires_grad=True) for _ in range(3)]
    decay, beta = -torch.rand(1, 200, 2), torch.rand(1, 200, 2)
    found = []
    for stretch in (1024, 64):
        monkeypatch.setattr(delta_rule, "STRETCH_TOKENS", stretch)
        out, finals = delta_rule._each(
            CHUNK, *row, g=decay, beta=beta, initial_state=None, output_final_state=True,
            use_qk_l2norm_in_kernel=True, bounds=[0, 200],
        )  # fmt: skip
        found.append([out, finals, *torch.autograd.grad(out.square().sum(), row)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
