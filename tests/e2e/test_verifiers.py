"""Environments of the real package `verifiers` as tasks and rewards, through a real proxy.

`benchmarks.install verifiers` installs it for `make test-long`, in an environment of its own: it
needs an older openai than the one here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_loop.extras.environments.verifiers import VerifiersConfig
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from proxy.records import SessionKind
from tests.e2e.agents.conftest import checkpoint, rendering, start_proxy
from tests.needs import needs
from tests.proxy.conftest import RunningProxy, StartProxy

__all__ = ["checkpoint", "rendering", "start_proxy"]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache/verifiers/bin/python"
pytestmark = [
    pytest.mark.long,
    needs(None if PYTHON.exists() else "run python -m benchmarks.install verifiers"),
]


def settings(env: str) -> VerifiersConfig:
    folder = Path(__file__).parent / "verifiers_envs"
    return VerifiersConfig(env=env, python=PYTHON, path=(folder,), harness="null")


async def episode(
    start_proxy: StartProxy, folder: Path, env: str, place: int, answer: Callable[[str], str]
) -> tuple[Rollout, RunningProxy]:
    """The episode of the task at that place of the environment's list."""
    proxy = await start_proxy()
    proxy.answers(answer)
    config = settings(env)
    *_, data = config.tasks(place + 1)
    loop = RemoteAgentLoop(
        proxy.control,
        config.build(),
        LauncherReward(),
        folder,
        trial=TrialConfig(timeout_s=180, max_retries=0),
    )
    try:
        task = Task(str(data["task_id"]), data, env)
        return await loop.run(task, kind=SessionKind.TRAIN), proxy
    finally:
        await loop.close()


def assert_recorded(rollout: Rollout, proxy: RunningProxy) -> None:
    log = (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    assert rollout.sampled_tokens == sum(len(call.answer_ids) for call in proxy.engine.calls)
    assert rollout.num_turns == len(proxy.engine.calls)
    assert set(rollout.forks) == set()


@pytest.mark.parametrize(("said", "reward"), [("It is 4.", 1.0), ("It is 5.", 0.0)])
async def test_single_turn(
    start_proxy: StartProxy, tmp_path: Path, said: str, reward: float
) -> None:
    rollout, proxy = await episode(start_proxy, tmp_path, "vf-sums", 1, lambda _: said)
    assert_recorded(rollout, proxy)
    assert rollout.task.prompt == "2+2?"
    assert rollout.reward == reward
    assert rollout.reward_parts == {"reward": reward, "correct": reward, "turns": 1.0}


async def test_several_turns(start_proxy: StartProxy, tmp_path: Path) -> None:
    """The first task's number is 5; the model guesses by bisection."""

    def guess(prompt: str) -> str:
        low, high = 0, 7
        for said in re.findall(r"(\d)<\|im_end\|>|user\n(higher|lower)", prompt):
            if said[0]:
                last = int(said[0])
            elif said[1] == "higher":
                low = last + 1
            else:
                high = last - 1
        return str((low + high) // 2)

    rollout, proxy = await episode(start_proxy, tmp_path, "vf-guess", 0, guess)
    assert_recorded(rollout, proxy)
    assert rollout.num_turns == 2
    assert rollout.reward_parts == {"reward": 1.0, "found": 1.0, "guesses": 2.0}


async def test_tool(start_proxy: StartProxy, tmp_path: Path) -> None:
    def look_up(prompt: str) -> str:
        found = re.search(r"\b(1707|2212)\b", prompt)
        if found is not None:
            return f"The code is {found[0]}."
        (name,) = set(re.findall(r'"name": "(\w*code\w*)"', prompt))
        call = f'{{"name": "{name}", "arguments": {{"colour": "blue"}}}}'
        return f"<tool_call>\n{call}\n</tool_call>"

    rollout, proxy = await episode(start_proxy, tmp_path, "vf-lookup", 1, look_up)
    assert_recorded(rollout, proxy)
    assert rollout.num_turns == 2
    assert rollout.reward == 2.0
    assert rollout.reward_parts == {"reward": 2.0, "right_code": 1.0}


async def test_episode_that_the_environment_cannot_finish_is_failed(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    rollout, _ = await episode(start_proxy, tmp_path, "vf-guess", 0, lambda _: "no number")
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reward is None
    assert "vf-guess" in (rollout.error or "")
    assert "invalid literal for int()" in (rollout.error or "")


async def test_episode_without_a_run_of_the_policy_has_no_reward_instead_of_0(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    rollout, proxy = await episode(start_proxy, tmp_path, "vf-untrained", 1, lambda _: "It is 4.")
    assert_recorded(rollout, proxy)
    assert rollout.reward is None
    assert not rollout.trainable
