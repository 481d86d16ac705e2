"""Each of several policies trains exactly what it sampled, as if no other one were trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import (
    AgentEnd,
    AgentResult,
    Graded,
    Group,
    Rollout,
    RolloutStatus,
    Segment,
    Task,
)
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trajectory import build_segments
from agent_loop.trial.config import TrialConfig
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.client import ProxyClient
from proxy.records import SessionKind, Turn
from tests.agent_loop.asking_agent import AskingAgent
from tests.agent_loop.recorded import token_trees
from tests.agent_loop.test_policies_of_a_trial import serve
from tests.proxy.conftest import RunningProxy
from tests.proxy.conftest import checkpoint as checkpoint
from tests.proxy.conftest import proxy as proxy
from tests.proxy.conftest import rendering as rendering
from tests.proxy.conftest import start_proxy as start_proxy
from trainer.learning.policy_parts import parts_of

POLICIES = ("planner", "coder", "frozen")
TRAINED = POLICIES[:2]


def part(rollout: Rollout, policy: str) -> Rollout:
    group = Group("g0", rollout.task, (rollout,))
    (own,) = parts_of([group], policy)[0].rollouts
    return own


def are_equal(first: Sequence[Segment], second: Sequence[Segment]) -> bool:
    return len(first) == len(second) and all(
        one.parent == other.parent
        and all(
            np.array_equal(getattr(one, name), getattr(other, name))
            for name in ("ids", "mask", "logprobs", "versions", "turns")
        )
        for one, other in zip(first, second, strict=True)
    )


@settings(max_examples=300, deadline=None)
@given(turns=token_trees(), data=st.data())
def test_part_of_a_policy_equals_the_trial_in_which_it_alone_is_trained(
    turns: list[Turn], data: st.DataObject
) -> None:
    sampled_by = data.draw(
        st.lists(st.sampled_from(POLICIES), min_size=len(turns), max_size=len(turns))
    )
    named = [
        replace(turn, sampling={**turn.sampling, "policy": policy})
        for turn, policy in zip(turns, sampled_by, strict=True)
    ]
    attempt, agent = Attempt("t", Task("t", {}), policies=TRAINED), AgentResult(AgentEnd.EXITED)
    rollout = build_rollout(attempt, agent, named, Graded(1.0))
    parts = [part(rollout, policy) for policy in TRAINED]
    for policy, own in zip(TRAINED, parts, strict=True):
        others = {turn.index for turn in named if turn.policy != policy}
        assert are_equal(own.segments, build_segments(named, untrained=others))
    assert sum(own.sampled_tokens for own in parts) == rollout.sampled_tokens


def test_rollout_without_a_token_of_the_policy_is_in_none_of_its_baselines() -> None:
    ids = np.array([1, 2], np.int32)
    segment = Segment(-1, ids, ids == 2, ids.astype(np.float32), ids, np.zeros(2, np.int32))
    rollout = Rollout(
        "t", Task("t", {}), RolloutStatus.DONE, 1.0, (segment,), turn_policies={0: "planner"}
    )
    assert part(rollout, "planner").trainable
    assert not part(rollout, "coder").trainable
    assert part(rollout, "coder").segments == ()


async def test_session_of_a_trial_trains_the_tokens_of_every_trained_policy(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    tokens = await serve(proxy)
    loop = RemoteAgentLoop(
        ProxyClient(proxy.url, proxy.control.admin_key),
        AskingAgent("policy", "small", "policy"),
        LauncherReward(),
        tmp_path,
        trial=TrialConfig(policies={"small": "coder"}, sandbox="off", max_retries=0),
        policy="planner",
        trained=TRAINED,
    )
    rollout = await loop.run(Task("sums", {}), kind=SessionKind.TRAIN)
    await loop.close()
    assert rollout.turn_policies == {0: "planner", 1: "coder", 2: "planner"}
    (stored,) = decode_group(encode_group(Group("g0", rollout.task, (rollout,)))).rollouts
    assert stored.turn_policies == rollout.turn_policies
    for policy, answers in (("planner", 2), ("coder", 1)):
        own = part(stored, policy)
        trained = np.concatenate([segment.ids[segment.mask] for segment in own.segments])
        assert np.array_equal(trained, [tokens[policy]] * 8 * answers)
