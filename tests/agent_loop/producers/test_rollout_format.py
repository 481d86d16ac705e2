"""Encoding and decoding groups without a loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.trajectory import build_segments
from proxy.records import Turn
from tests.agent_loop.recorded import token_trees

numbers = st.floats(allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(token_trees(), st.none() | numbers, st.sampled_from(RolloutStatus), st.data())
def test_decoded_group_equals_the_encoded_one(
    turns: list[Turn], reward: float | None, status: RolloutStatus, data: st.DataObject
) -> None:
    task = Task("a/1", {"prompt": "p", "nested": [1, {"x": None}]}, "source")
    rollout = Rollout(
        "t-1", task, status, reward,
        segments=build_segments(turns),
        reward_parts={"a": 0.5},
        turn_returns=data.draw(st.dictionaries(st.integers(0, 9), numbers)),
        turn_shares=data.draw(st.dictionaries(st.integers(0, 9), numbers)),
        stale_turns=data.draw(st.dictionaries(st.integers(0, 9), st.integers(1, 99))),
        truncated_turns=(1, 2),
        num_turns=len(turns),
        forks={"edited": 2},
        started_version=3,
        error="why",
        started_at=1.78e9,
        times_s={"total": 1.5},
        metrics={"sampled_tokens": 7.0},
        logs="somewhere",
        seed=11,
    )  # fmt: skip
    back = decode_group(encode_group(Group("g0", task, [rollout])))
    assert (back.group_id, back.task) == ("g0", task)
    (other,) = back.rollouts
    for field in dataclasses.fields(Rollout):
        if field.name != "segments":
            assert getattr(other, field.name) == getattr(rollout, field.name), field.name
    assert len(other.segments) == len(rollout.segments)
    for left, right in zip(other.segments, rollout.segments, strict=True):
        assert left.parent == right.parent
        for name in ("ids", "mask", "logprobs", "versions", "turns"):
            ours, theirs = getattr(left, name), getattr(right, name)
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs), name


def test_every_field_of_a_rollout_is_encoded() -> None:
    """A field that is added to the record but not to the format would be lost in a restart."""
    task = Task("a", {})
    filled = Rollout("t", task, RolloutStatus.DONE, 1.0)
    named = {"task", "segments", "pictures"}  # of segments: test_images.py
    names = {field.name for field in dataclasses.fields(Rollout)} - named
    for name in names:
        value = getattr(filled, name)
        changed: Any = {
            "status": RolloutStatus.FAILED, "reward": 2.0, "trial_id": "other",
            "truncated_turns": (5,), "turn_returns": {1: 0.5}, "forks": {"edited": 1},
            "turn_calls": {1: "submit {}"},
            "error": "e", "logs": "l", "prefix": "p@3",
        }.get(name, {"x": 1.0} if isinstance(value, dict) else 7)  # fmt: skip
        rollout = dataclasses.replace(filled, **{name: changed})
        (back,) = decode_group(encode_group(Group("g", task, [rollout]))).rollouts
        assert getattr(back, name) == changed, name


def test_another_format_is_refused() -> None:
    data = msgspec.msgpack.decode(encode_group(Group("g", Task("a", {}), [])))
    data[0] = 999
    with pytest.raises(ValueError, match="format 999"):
        decode_group(msgspec.msgpack.encode(data))
