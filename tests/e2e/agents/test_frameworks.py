"""Agents on the frameworks and command lines that people use, unmodified, in a hard conversation.

Each makes two calls at once, with numbers, emoji and combining characters in their arguments, reads
a long output, and gets an answer that is cut at `max_tokens`. docs/agents.md has the results as a
table. `make agents` installs them all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import RolloutStatus
from agent_loop.trajectory import flatten
from agent_loop.trial.config import SamplingConfig
from proxy.records import FinishReason, TurnStatus
from proxy.testing.scripted_engine import text_script
from tests.e2e.agents.model import MAX_TOKENS, play_hard
from tests.e2e.agents.test_agents import AGENTS, SCRIPTS, example, installed, pytestmark, trial
from tests.proxy.conftest import RunningProxy, StartProxy

__all__ = ["pytestmark"]

TURNS_WITH_CALLS = 2


@dataclass(frozen=True)
class Framework:
    """`dialects`: of which the first runs in CI. `causes`: why its requests may fork."""

    name: str
    dialects: tuple[str, ...] = ("chat",)
    python: str = "frameworks"
    """Its environment in `.agents`; `node`, or `command`: a file of `examples/agents`."""
    causes: frozenset[str] = field(default_factory=frozenset)
    flags: tuple[str, ...] = ()
    """More arguments of its command."""
    long: bool = False

    @property
    def environment(self) -> str:
        """The folder of `.agents` that it needs besides those of npm."""
        own = {"mistral_vibe": "vibe", "gptme": "gptme"}
        return own.get(self.name, "") if self.python in ("node", "command") else self.python

    def command(self, dialect: str) -> CommandConfig:
        env = {"DIALECT": dialect, "PACKAGES": str(AGENTS / "sdks")}
        if self.python == "command":
            return example(self.name, *self.flags)
        if self.python != "node":
            python = str(AGENTS / self.python / "bin/python")
            return CommandConfig(argv=(python, str(SCRIPTS / f"{self.name}.py")), env=env)
        return CommandConfig(argv=("node", str(SCRIPTS / f"{self.name}.mjs")), env=env)


FRAMEWORKS = (
    Framework("deepagents_agent", ("chat", "responses")),
    Framework("autogen_agent"),
    Framework("google_adk_agent"),
    Framework("strands_agent", long=True),
    Framework("agno_agent", long=True),
    Framework("llamaindex_agent", long=True),
    Framework("haystack_agent", long=True),
    Framework("semantic_kernel_agent", python="crewai", long=True),
    Framework("crewai_agent", python="crewai"),
    Framework("vercel_ai_agent", ("responses", "messages", "chat"), python="node"),
    Framework("openai_agents_js_agent", ("responses", "chat"), python="node"),
    Framework("langchain_js_agent", python="node", long=True),
    Framework("pi", python="command"),
    Framework("cline", python="command", flags=("--compaction", "off")),
    Framework("continue", python="command", long=True),
    Framework("mistral_vibe", python="command", causes=frozenset({"rolled_back"}), long=True),
    Framework(
        "gptme",
        python="command",
        causes=frozenset({"calls_changed", "compaction", "new_conversation"}),
        long=True,
    ),
)


def runs() -> list[Any]:
    """Every framework in every dialect; what is not in CI is marked `long`."""
    return [
        pytest.param(
            framework,
            dialect,
            id=f"{framework.name.removesuffix('_agent')}-{dialect}",
            marks=[
                *([pytest.mark.long] if framework.long or number else []),
                *([installed(framework.environment)] if framework.environment else []),
            ],
        )
        for framework in FRAMEWORKS
        for number, dialect in enumerate(framework.dialects)
    ]


@pytest.mark.parametrize(("framework", "dialect"), runs())
async def test_hard_conversation_is_one_exact_path(
    framework: Framework, dialect: str, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    plays_hard(proxy)
    sampling = SamplingConfig(max_tokens=MAX_TOKENS)
    rollout = await trial(proxy, framework.command(dialect), tmp_path, sampling=sampling)
    log = (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    cut_last = bool(turns) and turns[-1].finish_reason is FinishReason.LENGTH
    ends = RolloutStatus.TRUNCATED if cut_last else RolloutStatus.DONE
    assert rollout.status is ends, f"{rollout.error}\n{log}"
    assert rollout.reward == 1.0, log
    assert set(rollout.forks) == framework.causes, log
    assert {turn.dialect for turn in turns} == {dialect}
    assert {turn.status for turn in turns} == {TurnStatus.DONE}
    finished = Counter(turn.finish_reason for turn in turns)
    assert finished[FinishReason.TOOL_CALLS] == TURNS_WITH_CALLS
    assert finished[FinishReason.LENGTH] >= 1, log
    sampled = [call.answer_ids for call in proxy.engine.calls]
    assert [turn.sampled_ids.tolist() for turn in turns] == sampled
    paths = [trajectory.ids.tolist() for trajectory in flatten(rollout.segments)]
    assert len(paths) == 1 or framework.causes
    for call in proxy.engine.calls:
        assert any(path[: len(call.path)] == call.path for path in paths)


def plays_hard(proxy: RunningProxy) -> None:
    tokenizer = proxy.rendering.tokenizer
    proxy.engine.script = text_script(
        play_hard,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
