"""`examples/branching`: groups that begin with recorded turns of a rare success, or of a rare
failure."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.processes.host import ProcessConfig
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.records import Group, Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.tasks import Source, TaskStream
from agent_loop.trajectory import build_segments
from agent_loop.trial.config import TrialConfig
from examples.branching import producers
from examples.branching.producers import PrefixProducer, PrefixSampler, Rates, prefixes
from proxy.testing.scripted_engine import text_script
from tests.agent_loop.recorded import turn
from tests.agent_loop.test_remote_agent_loop import AGENT
from tests.proxy.conftest import RunningProxy

TASK = Task("t", {})
TURNS = 10
SIZE = 8
CONFIG = Rates(low=0.2, high=0.8)


def rollout(name: str, reward: float | None) -> Rollout:
    turns = [turn(i, i - 1 if i else None, 3 * i, [1], [2, 3]) for i in range(TURNS)]
    return Rollout(
        name, TASK, RolloutStatus.DONE if reward is not None else RolloutStatus.FAILED, reward,
        segments=build_segments(turns),
    )  # fmt: skip


def group(*rewards: float | None, name: str = "r") -> Group:
    return Group("g", TASK, [rollout(f"{name}{i}", reward) for i, reward in enumerate(rewards)])


def sampler_after(*rewards: float | None) -> PrefixSampler:
    sampler = PrefixSampler(CONFIG)
    assert sampler.choose(TASK) is None
    sampler.observe(group(*rewards), None)
    return sampler


def test_task_that_nearly_always_fails_begins_with_turns_of_its_success() -> None:
    origin = sampler_after(*[0.0] * 5, 1.0, 0.0, 0.0).choose(TASK)
    assert origin is not None
    assert (origin.session_id, origin.turn, origin.salvage) == ("r5", 4, False)


def test_task_that_nearly_always_succeeds_begins_with_turns_of_its_failure() -> None:
    origin = sampler_after(*[1.0] * 5, 0.0, 1.0, 1.0).choose(TASK)
    assert origin is not None
    assert origin.session_id == "r5"


@pytest.mark.parametrize(
    "rewards",
    [
        [0.0] * SIZE,  # no success to begin with
        [1.0] * SIZE,
        [0.0, 1.0] * 4,  # neither too hard nor too easy
        [0.0] * 5 + [1.0],  # too few rollouts
        [None] * SIZE,
    ],
)
def test_other_tasks_begin_at_the_start(rewards: Sequence[float | None]) -> None:
    assert sampler_after(*rewards).choose(TASK) is None


@pytest.mark.parametrize("rare", [1.0, 0.0])
@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_replayed_share_is_steered_to_groups_of_which_half_succeed(
    rare: float, power: float
) -> None:
    """The rare outcome has the probability share ** power once that share of it is replayed."""
    random = np.random.default_rng(5)
    sampler = sampler_after(*[1.0 - rare] * (SIZE - 1), rare)
    rates, from_start = [], 0
    for number in range(300):
        origin = sampler.choose(TASK)
        chance = 0.02 if origin is None else (origin.turn / (TURNS - 1)) ** power
        outcomes = np.where(random.random(SIZE) < chance, rare, 1.0 - rare)
        sampler.observe(group(*outcomes.tolist(), name=f"{number}-"), origin)
        if origin is None:
            from_start += 1
        elif number > 60:
            rates.append(float(outcomes.mean()))
    assert from_start == 150
    assert 0.4 < np.mean(rates) < 0.6


def test_groups_with_a_prefix_do_not_change_the_rate_of_the_task() -> None:
    sampler = sampler_after(*[0.0] * 7, 1.0)
    for _ in range(3):
        sampler.observe(group(*[1.0] * SIZE, name="easy"), sampler.choose(TASK))
        assert sampler.choose(TASK) is None
        sampler.observe(group(*[0.0] * SIZE), None)
        origin = sampler.choose(TASK)
        assert origin is not None
        assert origin.session_id == "r7"


def test_example_whose_session_is_gone_is_forgotten() -> None:
    sampler = sampler_after(*[0.0] * 7, 1.0)
    origin = sampler.choose(TASK)
    assert origin is not None
    sampler.observe(group(*[None] * SIZE), origin)
    assert sampler.choose(TASK) is None
    sampler.observe(group(*[0.0] * SIZE), None)
    assert sampler.choose(TASK) is None


def test_state_survives_as_json() -> None:
    sampler = sampler_after(*[0.0] * 7, 1.0)
    other = PrefixSampler(CONFIG)
    other.restore(json.loads(json.dumps(sampler.state())))
    assert other.choose(TASK) == sampler.choose(TASK) is not None


def test_number_of_remembered_tasks_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_TASKS", 3)
    sampler = PrefixSampler(CONFIG)
    for number in range(5):
        sampler.choose(replace(TASK, task_id=str(number)))
    assert [name.split("\n")[-1] for name in sampler.state()] == ["2", "3", "4"]


GRADE = "import sys; sys.exit('Path 1 ' not in open('answer').read())"


def paths() -> Callable[[str], str]:
    """Answers of a model that chooses a path in its first answer, each time another one, and then
    stays on it."""
    begun = Counter[str]()

    def answer(prompt: str) -> str:
        if "Path " in prompt:
            return "Path " + prompt.rpartition("Path ")[2].split(" ")[0] + " on"
        begun[""] += 1
        return f"Path {begun['']} on"

    return answer


@asynccontextmanager
async def producing(proxy: RunningProxy, folder: Path) -> AsyncIterator[PrefixProducer]:
    """One task, of which one in four rollouts from the start succeeds, and one group per step."""
    tokenizer = proxy.rendering.tokenizer
    proxy.engine.script = text_script(
        paths(),
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=AGENT), ProcessConfig(grace_s=0.2)),
        Verifier(VerifierConfig(argv=(sys.executable, "-I", "-S", "-c", GRADE))),
        folder / "trials",
        trial=TrialConfig(max_retries=0),
    )
    config = RolloutConfig(groups_per_step=1, group_size=4, concurrency=2)
    tasks = TaskStream([Source("s", [Task("t", {"prompt": "Go.", "turns": 3}, "s")])], seed=0)
    try:
        yield prefixes(loop, tasks, config, 0, low=0.3, min_rollouts=4)
    finally:
        await loop.close()


async def test_second_group_of_a_hard_task_begins_with_turns_of_its_success(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    async with producing(proxy, tmp_path) as producer:
        (first,) = await producer.next_batch(0)
        calls = len(proxy.engine.calls)
        (second,) = await producer.next_batch(0)

    assert sorted(r.reward or 0.0 for r in first.rollouts) == [0.0, 0.0, 0.0, 1.0]
    (success,) = [r for r in first.rollouts if r.reward == 1.0]
    assert [r.prefix for r in first.rollouts] == [""] * 4
    assert [r.prefix for r in second.rollouts] == [f"{success.trial_id}@1"] * 4
    assert [r.reward for r in second.rollouts] == [1.0] * 4
    assert len(proxy.engine.calls) - calls == 4 * 2
    own = sum(len(call.answer_ids) for call in proxy.engine.calls[calls:])
    assert sum(r.sampled_tokens for r in second.rollouts) == own
    assert [known["success"] for known in producer.state()["prefixes"].values()] == [
        success.trial_id
    ]


async def test_group_whose_prefix_was_removed_is_replaced_even_if_a_step_has_one_group(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    async with producing(proxy, tmp_path) as producer:
        (first,) = await producer.next_batch(0)
        (success,) = [r for r in first.rollouts if r.reward == 1.0]
        await proxy.control.delete(success.trial_id)
        (second,) = await producer.next_batch(0)
    assert [r.prefix for r in second.rollouts] == [""] * 4
    assert producer.counts["failed"] == 1
