"""Real agents, unmodified, run again from the start: their first calls are answered from a recorded
trial, and what follows continues the recorded ids.

Their tools run again, in a workspace of their own. Their outputs differ in times, process ids,
durations and temporary paths.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import Rollout, RolloutStatus
from proxy.records import Origin, TurnStatus
from tests.e2e.agents.model import play
from tests.e2e.agents.rewind.rewound import Recording, Rewinder
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
FIRST_DATE = 3
"""The first turn whose request has the result of a command that differs by nature."""


async def assert_rewound(
    proxy: RunningProxy, command: CommandConfig, trials: Path, turns: range | None
) -> None:
    """Records a trial and runs it again to each of `turns` (None: to every turn)."""

    async def run(origin: Origin | None) -> Rollout:
        return await trial(proxy, command, trials, origin=origin)

    rewinder = Rewinder(proxy, run, trials, partial(play, commands=COMMANDS))
    parent = await rewinder.record()
    assert parent.rollout.status is RolloutStatus.DONE, f"{parent.rollout.error}\n{log_of(parent)}"
    assert len(parent.turns) >= TURNS
    for turn in turns or range(1, len(parent.turns) + 1):
        again = await rewinder.rerun(parent, turn)
        context = f"to turn {turn}: {again}"
        assert again.reached, context
        assert again.workspace is None, context
        assert again.early_calls == 0, context
        assert again.first_prompt, context
        branch, calls = again.branch, proxy.engine.calls
        assert [t.status for t in branch.turns[:turn]] == [TurnStatus.CONTEXT] * turn, context
        assert len(branch.turns) == len(parent.turns), context
        assert len(calls) == len(parent.turns) - turn, context
        assert branch.final == parent.final, context
        assert branch.rollout.sampled_tokens == sum(len(call.answer_ids) for call in calls)
        assert {t.fork_cause for t in branch.turns} == {t.fork_cause for t in parent.turns}
        assert again.tolerated or turn < FIRST_DATE, context


def log_of(recording: Recording) -> str:
    return (Path(recording.rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]


EXAMPLES: dict[str, list[pytest.MarkDecorator]] = {
    "claude_code": [],
    "codex": [],
    "codex_0_77": [pytest.mark.long],
    "opencode": [pytest.mark.long],
    "opencode_responses": [pytest.mark.long],
    "opencode_messages": [pytest.mark.long],
    "qwen_code": [pytest.mark.long],
    "mini_swe_agent": [pytest.mark.long],
    "pi": [pytest.mark.long],
    "openhands": [pytest.mark.long, installed("openhands")],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, marks in EXAMPLES.items()]
)
async def test_agent_is_rewound_to_a_turn(
    name: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    await assert_rewound(proxy, example(name), tmp_path / "trials", range(5, 6))


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
async def test_agent_is_rewound_to_every_turn(
    name: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    await assert_rewound(proxy, example(name), tmp_path / "trials", None)


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
    await assert_rewound(proxy, command, tmp_path / "trials", None)
