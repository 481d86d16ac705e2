"""`examples/branching`: groups whose rollouts branch from finished ones: an unmodified agent, a
real proxy, a scripted engine; and the choice of turns."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes.host import ProcessConfig
from agent_loop.producers.groups import rollout_seed
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.tasks import Source, TaskStream
from agent_loop.trajectory import build_segments
from agent_loop.trial.config import TrialConfig
from examples.branching.producers import TreeGroup, trees, turn_surprise
from proxy.testing.scripted_engine import text_script
from tests.agent_loop.recorded import turn
from tests.agent_loop.scripted_loop import ScriptedLoop
from tests.agent_loop.test_remote_agent_loop import AGENT
from tests.agent_loop.virtual_time import run_in_virtual_time
from tests.proxy.conftest import RunningProxy

TURNS = 3
GRADE = "import sys; sys.exit('Answer 2' in open('answer').read())"


def rollout(*logprobs: float) -> Rollout:
    """A chain of turns of two sampled tokens each, with these log-probabilities."""
    turns = [
        structs.replace(
            turn(index, index - 1 if index else None, 3 * index, [1], [2, 3]),
            logprobs=np.array([logprob, logprob], np.float32),
        )
        for index, logprob in enumerate(logprobs)
    ]
    return Rollout("t", Task("t", {}), RolloutStatus.DONE, 1.0, segments=build_segments(turns))


def points(trunk: Rollout, **settings: Any) -> list[int]:
    """The turns at which others branch from this rollout."""
    stream = TaskStream([Source("s", [trunk.task])], seed=0)
    group = trees(ScriptedLoop(), stream, RolloutConfig(), 0, **settings)._next_group(0)
    assert isinstance(group, TreeGroup)
    return [*group.points(trunk)]


def test_every_kth_turn_is_chosen_up_to_the_bound() -> None:
    trunk = rollout(*[-1.0] * 7)
    assert points(trunk, every=1) == [1, 2, 3, 4, 5, 6]
    assert points(trunk, every=3) == [3, 6]
    assert points(trunk, every=2, max_points=2) == [2, 4]


def test_most_uncertain_turns_have_the_lowest_mean_log_probability() -> None:
    trunk = rollout(-9.0, -0.1, -2.0, -0.5, -3.0)
    assert turn_surprise(trunk) == pytest.approx({0: 9.0, 1: 0.1, 2: 2.0, 3: 0.5, 4: 3.0})
    assert points(trunk, most_uncertain=2) == [2, 4]


def test_turns_before_a_call_are_found_by_its_name_or_its_arguments() -> None:
    calls = {
        0: 'submit {"answer": 1}',
        1: 'bash {"command": "ls"}\nsubmit {"answer": 2}',
        3: 'bash {"command": "git commit -m submit "}',
        9: "submit {}",  # not trained
    }
    trunk = replace(rollout(*[-1.0] * 5), turn_calls=calls)
    assert points(trunk, before_call="^submit ") == [1]
    assert points(trunk, before_call="git commit") == [3]
    assert points(trunk, before_call="submit ") == [1, 3]
    assert points(trunk, before_call="") == [1, 2, 3, 4]


def test_rollout_without_a_reward_is_not_branched() -> None:
    trunk = rollout(-1.0, -1.0)
    failed = Rollout("t", trunk.task, RolloutStatus.FAILED, None, segments=trunk.segments)
    assert points(failed, every=1) == []


@pytest.mark.parametrize(
    "given", [{}, {"every": 2, "most_uncertain": 1}, {"every": 2, "before_call": "a"}]
)
def test_one_way_to_choose_turns_is_required(given: dict[str, Any]) -> None:
    stream = TaskStream([Source("s", [Task("t", {})])], seed=0)
    with pytest.raises(ValueError, match="set one of"):
        trees(ScriptedLoop(), stream, RolloutConfig(), 0, **given)


def every_turn(trunk: Rollout) -> list[int]:
    return [turn for turn in turn_surprise(trunk) if turn > 0]


def test_branches_that_end_soon_do_not_make_other_rollouts_stragglers() -> None:
    """One rollout ends after 10 s and its branches 1 s later, except for one; the limit is twice
    the 15 s between the first rollouts to end."""
    seconds = {rollout_seed(2, 0, number): s for number, s in enumerate((10.0, 20.0, 25.0, 28.0))}
    seconds[rollout_seed(2, 0, 0, 1, 3)] = 500.0
    group = TreeGroup(
        ScriptedLoop(duration=lambda seed: seconds.get(seed, 1.0), version_now=lambda: 0),
        Task("t", {}), number=0, size=4, seed=2, version=lambda: 0, slots=asyncio.Semaphore(99),
        straggler_factor=2.0, points=every_turn, children=4,
    )  # fmt: skip
    found = run_in_virtual_time(group.run())
    assert len(found.rollouts) == 4 + 4 * 4
    aborted = [n for n, r in enumerate(found.rollouts) if r.status is RolloutStatus.ABORTED]
    assert aborted == [4 + 3]


async def test_rollouts_of_a_group_branch_from_its_first_one(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    """Answers differ from call to call, so that each branch samples other tokens than its trunk."""
    samples = Counter[str]()

    def answer(prompt: str) -> str:
        samples[prompt] += 1
        return f"Answer {samples[prompt]} of {len(prompt)}."

    tokenizer = proxy.rendering.tokenizer
    proxy.engine.script = text_script(
        answer,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=AGENT), ProcessConfig(grace_s=0.2)),
        Verifier(VerifierConfig(argv=(sys.executable, "-I", "-S", "-c", GRADE))),
        tmp_path / "trials",
        trial=TrialConfig(max_retries=0),
    )
    task = Task("t", {"prompt": "Count.", "turns": TURNS})
    group = TreeGroup(
        loop, task, number=4, size=1, seed=2, version=lambda: 0, slots=asyncio.Semaphore(2),
        points=every_turn, children=2,
    )  # fmt: skip
    try:
        found = await group.run()
    finally:
        await loop.close()

    assert [r.error for r in found.rollouts] == [None] * 5
    trunk, *branches = found.rollouts
    assert trunk.prefix == ""
    expected = [f"{trunk.trial_id}@{k}" for k in (1, 1, 2, 2)]
    assert [branch.prefix for branch in branches] == expected
    assert [branch.num_turns for branch in branches] == [2, 2, 1, 1]
    assert len({r.seed for r in found.rollouts}) == 5
    assert len(proxy.engine.calls) == 3 + 2 + 2 + 1 + 1
    sampled = sum(len(call.answer_ids) for call in proxy.engine.calls)
    assert sum(r.sampled_tokens for r in found.rollouts) == sampled
    assert {r.reward for r in found.rollouts} == {0.0, 1.0}
    assert not found.uniform
