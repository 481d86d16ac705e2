"""An environment on a real OpenEnv server, with actions of a model behind a real proxy.

`benchmarks.install openenv` installs OpenEnv for `make test-long`, in an environment of its own.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from agent_loop.extras.environments.openenv import OpenEnvConfig
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
PYTHON = ROOT / ".cache/openenv/bin/python"
pytestmark = [
    pytest.mark.long,
    needs(None if PYTHON.exists() else "run python -m benchmarks.install openenv"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a running OpenEnv server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(__file__).parent / "openenv_server.py"
    with subprocess.Popen([PYTHON, program, str(port)]) as process:
        url = f"http://127.0.0.1:{port}"
        _until_healthy(url)
        yield url
        process.terminate()


@retry(
    retry=retry_if_exception_type(httpx.TransportError),
    stop=stop_after_delay(180),
    wait=wait_fixed(0.5),
    reraise=True,
)
def _until_healthy(url: str) -> None:
    httpx.get(f"{url}/health").raise_for_status()


async def episode(
    start_proxy: StartProxy,
    url: str,
    folder: Path,
    answer: Callable[[str], str],
    *,
    seed: int = 1,
    max_steps: int = 10,
) -> tuple[Rollout, RunningProxy]:
    proxy = await start_proxy()
    proxy.answers(answer)
    loop = RemoteAgentLoop(
        proxy.control,
        OpenEnvConfig(url=url, max_steps=max_steps).build(),
        LauncherReward(),
        folder,
        trial=TrialConfig(timeout_s=120, max_retries=0),
    )
    try:
        task = Task("guess-1", {"reset": {"seed": seed}}, "guess")
        return await loop.run(task, kind=SessionKind.TRAIN), proxy
    finally:
        await loop.close()


def bisect(prompt: str) -> str:
    """The next guess after the hints in the prompt."""
    low, high, last = 0, 7, 0
    for said, hint in re.findall(r'"number": (\d)\}|"text": "(higher|lower)"', prompt):
        if said:
            last = int(said)
        elif hint == "higher":
            low = last + 1
        else:
            high = last - 1
    return f'```json\n{{"number": {(low + high) // 2}}}\n```'


def guesses(number: int) -> int:
    """How many guesses `bisect` needs."""
    low, high, count = 0, 7, 1
    while (middle := (low + high) // 2) != number:
        low, high = (middle + 1, high) if middle < number else (low, middle - 1)
        count += 1
    return count


async def test_environment_is_stepped_to_its_end_and_gives_the_reward(
    start_proxy: StartProxy, server: str, tmp_path: Path
) -> None:
    rollout, proxy = await episode(start_proxy, server, tmp_path, bisect)
    count = guesses(random.Random(1).randrange(8))
    log = (Path(rollout.logs or "") / "agent.log").read_text()[-2000:]
    assert rollout.status is RolloutStatus.DONE, log
    assert rollout.num_turns == len(proxy.engine.calls) == count > 1
    assert rollout.reward == pytest.approx(1 - 0.1 * (count - 1))
    assert rollout.reward_parts["steps"] == count
    assert set(rollout.forks) == set()
    assert rollout.sampled_tokens == sum(len(call.answer_ids) for call in proxy.engine.calls)


async def test_episodes_at_the_same_time_have_environments_of_their_own(
    start_proxy: StartProxy, server: str, tmp_path: Path
) -> None:
    proxy = await start_proxy()
    proxy.answers(bisect)
    launcher = OpenEnvConfig(url=server).build()
    trial = TrialConfig(timeout_s=120, max_retries=0)
    loop = RemoteAgentLoop(proxy.control, launcher, LauncherReward(), tmp_path, trial=trial)
    tasks = [Task(f"guess-{seed}", {"reset": {"seed": seed}}, "guess") for seed in range(4)]
    runs = (loop.run(task, kind=SessionKind.TRAIN) for task in tasks)
    rollouts = await asyncio.gather(*runs)
    await loop.close()
    expected = [guesses(random.Random(seed).randrange(8)) for seed in range(4)]
    assert [rollout.num_turns for rollout in rollouts] == expected


async def test_answer_that_is_not_an_action_is_told_to_the_model(
    start_proxy: StartProxy, server: str, tmp_path: Path
) -> None:
    rollout, proxy = await episode(
        start_proxy, server, tmp_path, lambda _: '{"colour": "red"}', max_steps=2
    )
    assert rollout.status is RolloutStatus.DONE
    assert (rollout.reward, rollout.num_turns) == (0.0, 2)
    tokenizer = proxy.rendering.tokenizer
    assert "This is not an action" in tokenizer.decode(proxy.engine.calls[1].path)


async def test_failing_environment_is_no_reward(
    start_proxy: StartProxy, server: str, tmp_path: Path
) -> None:
    rollout, _ = await episode(start_proxy, server, tmp_path, lambda _: '{"number": -1}')
    assert rollout.reward is None
    assert not rollout.trainable
    log = (Path(rollout.logs or "") / "agent.log").read_text()
    assert "ServerError: the environment fails" in log
