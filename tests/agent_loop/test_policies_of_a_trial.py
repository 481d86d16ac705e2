"""A trial samples from the policies that its run names, and trains only the tokens of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from agent_loop.records import Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from proxy.client import ProxyClient
from proxy.records import Origin, SessionKind
from tests.agent_loop.asking_agent import AskingAgent
from tests.proxy.conftest import RunningProxy

TASK = Task("sums", {})


async def serve(proxy: RunningProxy) -> dict[str, int]:
    """Publishes two policies; returns the token of which each one's answers consist."""
    tokens = {}
    for name, letter in {"planner": "p", "coder": "c"}.items():
        (token,) = proxy.rendering.tokenizer.encode(letter)
        proxy.engine.adapters[f"{name}@5.aa"] = lambda _, token=token: [token] * 8  # type: ignore[misc]
        await proxy.control.publish_policy(name, 5, f"{name}@5.aa")
        tokens[name] = token
    return tokens


def loop_of(proxy: RunningProxy, trials: Path) -> RemoteAgentLoop:
    return RemoteAgentLoop(
        ProxyClient(proxy.url, proxy.control.admin_key),
        AskingAgent("policy", "small", "policy"),
        LauncherReward(),
        trials,
        trial=TrialConfig(policies={"small": "coder"}, sandbox="off", max_retries=0),
        policy="planner",
    )


async def test_tokens_of_another_policy_are_context(proxy: RunningProxy, tmp_path: Path) -> None:
    tokens = await serve(proxy)
    loop = loop_of(proxy, tmp_path)
    rollout = await loop.run(TASK, kind=SessionKind.TRAIN)
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    await loop.close()
    assert [turn.policy for turn in turns] == ["planner", "coder", "planner"]
    ids = np.concatenate([segment.ids for segment in rollout.segments])
    trained = np.concatenate([segment.mask for segment in rollout.segments])
    assert np.array_equal(ids[trained], [tokens["planner"]] * 16)
    assert (ids == tokens["coder"]).sum() >= 8


async def test_branch_of_a_trial_samples_from_the_same_policies(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    tokens = await serve(proxy)
    loop = loop_of(proxy, tmp_path)
    first = await loop.run(TASK, kind=SessionKind.TRAIN)
    branch = await loop.run(TASK, kind=SessionKind.TRAIN, origin=Origin(first.trial_id, 1))
    session, turns = await proxy.control.get_turns(branch.trial_id)
    await loop.close()
    assert session.sampling["policies"] == {"": "planner", "small": "coder"}
    assert [turn.session_id == branch.trial_id for turn in turns] == [False, True, True]
    assert [turn.policy for turn in turns] == ["planner", "coder", "planner"]
    trained = np.concatenate([segment.ids[segment.mask] for segment in branch.segments])
    assert np.array_equal(trained, [tokens["planner"]] * 8)
