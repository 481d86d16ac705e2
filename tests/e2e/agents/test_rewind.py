"""Real agents, unmodified, run again from the start: their first calls are answered from a recorded
trial, and what follows continues the recorded ids.

Their tools run again, in a workspace of their own. Their outputs differ in times, process ids,
durations and temporary paths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import Rollout, RolloutStatus
from proxy.engines.scripted import text_script
from proxy.records import Origin, TurnStatus
from proxy.token_tree.paths import path
from tests.e2e.agents.model import play
from tests.e2e.agents.test_agents import AGENTS, SCRIPTS, example, installed, pytestmark, trial
from tests.proxy.conftest import RunningProxy, StartProxy

__all__ = ["pytestmark"]

COMMANDS = (
    "echo hi > out.txt",
    "date; ls -l",
    "echo pid $$",
    "mktemp -d",
    "seq 1 5 > numbers.txt; wc -l numbers.txt",
    "python3 -c 'import time; print(f\"took {time.perf_counter() % 1:.6f} s\")'",
    "mkdir -p folder; cp out.txt folder/copy.txt; find . -name copy.txt",
    "cat out.txt numbers.txt; date +%s",
)
TURNS = len(COMMANDS) + 1
State = dict[str, bytes]


def state_of(folder: Path) -> State:
    """Every file that the agent's tools have written, by its path."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


class Watched:
    """A proxy whose engine notes the workspace of the latest trial at each of its calls."""

    def __init__(self, proxy: RunningProxy, trials: Path) -> None:
        self.proxy = proxy
        self.trials = trials
        self.states: list[State] = []
        tokenizer = proxy.rendering.tokenizer
        answers = text_script(
            partial(play, commands=COMMANDS),
            decode=tokenizer.decode,
            encode=tokenizer.encode,
            end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
        )
        proxy.engine.script = lambda prompt_ids: self._noted(answers, prompt_ids)

    def _noted(self, answers: Callable[..., Any], prompt_ids: list[int]) -> Any:
        latest = max(self.trials.iterdir(), key=lambda folder: folder.stat().st_ctime_ns)
        self.states.append(state_of(latest / "work"))
        return answers(prompt_ids)

    async def run(self, command: CommandConfig, origin: Origin | None = None) -> Rollout:
        self.states.clear()
        self.proxy.engine.calls.clear()
        return await trial(self.proxy, command, self.trials, origin=origin)

    async def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {self.proxy.control.admin_key}"}
        url = f"{self.proxy.url}/sessions/{name}/events"
        async with self.proxy.http.get(url, headers=headers) as response:
            found = orjson.loads(await response.read())["events"]
        return [event for event in found if event["kind"] == kind]


def log_of(rollout: Rollout) -> str:
    return (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]


async def assert_rewound(watched: Watched, command: CommandConfig, turns: range | None) -> None:
    """Records a trial and runs it again to each of `turns` (None: to every turn)."""
    proxy = watched.proxy
    parent = await watched.run(command)
    assert parent.status is RolloutStatus.DONE, f"{parent.error}\n{log_of(parent)}"
    _, recorded = await proxy.control.get_turns(parent.trial_id)
    assert len(recorded) >= TURNS
    states = [*watched.states, state_of(watched.trials / parent.trial_id / "work")]
    for turn in turns or range(1, len(recorded) + 1):
        branch = await watched.run(command, Origin(parent.trial_id, turn))
        context = f"to turn {turn}: {branch.error}\n{log_of(branch)}"
        diverged = await watched.events(branch.trial_id, "diverged")
        assert not diverged, f"{diverged[0]['summary']}\n{diverged[0]['diff']}\n{context}"
        _, again = await proxy.control.get_turns(branch.trial_id)
        statuses = [each.status for each in again]
        assert statuses[:turn] == [TurnStatus.CONTEXT] * turn, context
        assert len(again) == len(recorded), context
        assert len(proxy.engine.calls) == len(recorded) - turn, context
        after = [*watched.states, state_of(watched.trials / branch.trial_id / "work")]
        assert after == states[turn:], context
        for call, own in zip(proxy.engine.calls, again[turn:], strict=True):
            before = path(recorded, own.parent).tolist() if own.parent == turn - 1 else []
            assert call.prompt_ids[: len(before)] == before
        assert branch.sampled_tokens == sum(len(c.answer_ids) for c in proxy.engine.calls)
        assert {each.fork_cause for each in again} == {each.fork_cause for each in recorded}
        assert await watched.events(branch.trial_id, "tolerated"), context


EXAMPLES = [
    "claude_code",
    "codex",
    pytest.param("codex_0_77", marks=pytest.mark.long),
    pytest.param("opencode", marks=pytest.mark.long),
    pytest.param("opencode_responses", marks=pytest.mark.long),
    pytest.param("opencode_messages", marks=pytest.mark.long),
    pytest.param("qwen_code", marks=pytest.mark.long),
    pytest.param("mini_swe_agent", marks=pytest.mark.long),
    pytest.param("pi", marks=pytest.mark.long),
    pytest.param("openhands", marks=[pytest.mark.long, installed("openhands")]),
]


@pytest.mark.parametrize("name", EXAMPLES)
async def test_agent_is_rewound_to_a_turn(
    name: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    await assert_rewound(Watched(proxy, tmp_path / "trials"), example(name), range(5, 6))


@pytest.mark.long
@pytest.mark.parametrize("name", [e if isinstance(e, str) else e.values[0] for e in EXAMPLES])
async def test_agent_is_rewound_to_every_turn(
    name: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    await assert_rewound(Watched(proxy, tmp_path / "trials"), example(name), None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("openai_sdk", "chat"),
        ("openai_sdk", "responses"),
        ("anthropic_sdk", "messages"),
        ("openai_agents", "responses"),
        ("pydantic_ai_agent", "chat"),
        ("langgraph_agent", "chat"),
        ("smolagents_agent", "chat"),
    ],
)
async def test_sdk_is_rewound_to_every_turn(
    name: str, dialect: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    argv = (str(AGENTS / "python/bin/python"), str(SCRIPTS / f"{name}.py"))
    command = CommandConfig(argv=argv, env={"DIALECT": dialect})
    await assert_rewound(Watched(proxy, tmp_path / "trials"), command, None)
