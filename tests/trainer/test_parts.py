"""Each rank gets its own part of a batch, and the parts together are the batch."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.policy.test_policy import make_batch, make_policy
from tests.trainer.rollouts import group
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import Batch, BatchPart, build_batch, joined, part_in_micro_batches
from trainer.learning.models import Models, SaveState
from trainer.rows.packing import divide, lay_out


def parts_of(batch: Batch, ranks: int, *, share_prefixes: bool = True) -> list[BatchPart]:
    divided = divide(batch, max_tokens=96, share_prefixes=share_prefixes, multiple_of=ranks)
    return [part_in_micro_batches(batch, divided[rank::ranks]) for rank in range(ranks)]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**20), ranks=st.integers(1, 5), share=st.booleans())
def test_every_token_is_in_exactly_one_part(seed: int, ranks: int, share: bool) -> None:
    batch = make_batch(seed)
    for name in (each.name for each in dataclasses.fields(batch) if each.name != "stale"):
        if getattr(batch, name) is None:  # a column that a step of training computes
            setattr(batch, name, batch.logprobs - 1)
    columns = [
        each.name
        for each in dataclasses.fields(batch)
        if isinstance(getattr(batch, each.name), torch.Tensor)
    ]
    parts = parts_of(batch, ranks, share_prefixes=share)
    assert sorted(torch.cat([part.tokens for part in parts]).tolist()) == list(
        range(batch.num_tokens)
    )
    for name in ("ids", "position", "turns", "logprobs", "versions", "returns", "prox_logprobs"):
        column = joined(parts, [getattr(part.batch, name).float() for part in parts])
        assert torch.equal(column, getattr(batch, name).float())
    for part in parts:
        rollouts, sequences = part.batch.num_rollouts, len(part.batch.sequences)
        lengths = dict.fromkeys(("group", "rewards", "trial_rewards"), rollouts)
        lengths["sequence_rollout"] = sequences
        for name in columns:
            own = lengths.get(name, part.batch.num_tokens)
            assert len(getattr(part.batch, name)) == own, name
        names = [part.batch.name(token) for token in range(part.batch.num_tokens)]
        assert names == [batch.name(token) for token in part.tokens.tolist()]
        for own, token in enumerate(part.tokens.tolist()):
            ids = part.batch.sequences[int(part.batch.sequence[own])]
            assert np.array_equal(ids, batch.sequences[int(batch.sequence[token])])


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_micro_batches_of_the_parts_are_those_of_the_batch(share_prefixes: bool) -> None:
    batch = make_batch(1)
    divided = divide(batch, max_tokens=96, share_prefixes=share_prefixes, multiple_of=3)
    whole = lay_out(batch, divided)
    for rank, part in enumerate(parts_of(batch, 3, share_prefixes=share_prefixes)):
        micros = lay_out(part.batch, part.batch.micro_batches)
        assert len(micros) == len(whole[rank::3])
        for micro, expected in zip(micros, whole[rank::3], strict=True):
            assert torch.equal(micro.ids, expected.ids)
            assert torch.equal(micro.positions, expected.positions)
            assert torch.equal(micro.layout.ends, expected.layout.ends)
            assert torch.equal(micro.predictors, expected.predictors)
            assert micro.share == expected.share
            assert torch.equal(part.tokens[micro.targets], expected.targets)


def test_part_that_is_sent_holds_nothing_of_the_other_parts() -> None:
    rng = np.random.default_rng(2)
    batch = build_batch([group(rng, f"task{i}", segments=6) for i in range(32)])
    parts = parts_of(batch, 4)
    sizes = [len(pickle.dumps(part.batch)) for part in parts]
    tokens = [sum(map(len, part.batch.sequences)) for part in parts]
    assert sum(tokens) == batch.input_tokens
    assert len(pickle.dumps(batch)) / 2 > max(sizes)


def test_losses_of_the_parts_are_those_of_the_batch() -> None:
    """Also those of sequence-level ratios and corrections, and of a rejection over the batch."""
    algorithm = Algorithm(
        AlgorithmConfig.model_validate({"preset": "grpo", "loss": "gspo", "prox": "recompute"})
    )
    batch = make_batch(3)
    batch.prox_logprobs, batch.ref_logprobs = batch.logprobs - 0.1, batch.logprobs - 0.3
    algorithm.compute_advantages(batch)
    logprobs = batch.logprobs - 0.2
    weights = algorithm.weigh(batch)
    every = torch.arange(batch.num_tokens)
    whole = algorithm.loss(batch, weights)(logprobs, -logprobs, every).losses
    parts = parts_of(batch, 3)
    losses = []
    for part in parts:
        own = logprobs[part.tokens]
        loss = algorithm.loss(part.batch, weights.of(part.tokens))
        losses.append(loss(own, -own, torch.arange(len(own))).losses)
    assert torch.equal(joined(parts, losses), whole)


def test_every_rank_saves_the_state_of_rank_0(checkpoint: Path, tmp_path: Path) -> None:
    """Rank 0 leads the updates, and DCP takes a plain value from any rank."""
    algorithm = AlgorithmConfig.model_validate(
        {"preset": "grpo", "kl": {"adaptive": {"target": 1}}}
    )
    follower = Models(make_policy(checkpoint), Algorithm(algorithm))
    SaveState(tmp_path / "state", 7, {"kl_coefficient": 0.5}).on(follower)
    assert (follower.updates, follower.algorithm.kl_coefficient) == (7, 0.5)
