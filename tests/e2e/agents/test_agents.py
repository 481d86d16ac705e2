"""Real agents, unmodified: each solves a short task with tools through the proxy.

Each runs as in training: by the `command` launcher with the agent's file of `examples/agents`, in a
session of its own, and with a reward for its work. `make agents` installs them. Each prompt extends
a recorded path, or forks with the cause that is known for this agent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Rollout, RolloutStatus, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.verifier import Verifier, VerifierConfig
from agent_loop.trajectory import flatten
from agent_loop.trial.config import SamplingConfig, TrialConfig
from proxy.client import ProxyClient
from proxy.records import Origin, SessionKind
from proxy.testing.scripted_engine import text_script
from proxy.token_tree.paths import common_prefix
from tests.e2e.agents.model import COMMANDS, play
from tests.needs import needs
from tests.proxy.conftest import RunningProxy, StartProxy

ROOT = Path(__file__).parents[3]
AGENTS = ROOT / ".agents"
EXAMPLES = ROOT / "examples" / "agents"
SCRIPTS = Path(__file__).parent / "scripts"
PROMPT = "Run the shell command: echo hi > out.txt . Then read the file and finish."

pytestmark = [
    pytest.mark.agents,
    needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents"),
]


@dataclass(frozen=True)
class Agent:
    """`causes`: why its requests may fork; if empty, every request extends."""

    name: str
    causes: frozenset[str] = field(default_factory=frozenset)
    turns: int = len(COMMANDS) + 1
    """At least."""
    reads_profile: bool = True
    """Its shell may run the profile of the user."""


def installed(name: str) -> pytest.MarkDecorator:
    folder = AGENTS / name
    there = (folder / ".ready").exists()
    return needs(None if there else f"no {folder}: make agents-long, with Python 3.12")


EXAMPLE_AGENTS: list[Any] = [
    Agent("claude_code", reads_profile=False),
    Agent("codex", reads_profile=False),
    Agent("codex_0_77", reads_profile=False),
    Agent("opencode"),
    # `test_frameworks.py` runs its client, the AI SDK, in this dialect.
    pytest.param(Agent("opencode_responses"), marks=pytest.mark.long),
    Agent("opencode_messages"),
    Agent("qwen_code"),
    Agent("mini_swe_agent"),
    pytest.param(Agent("openhands"), marks=installed("openhands")),
]
SDK_AGENTS: list[Any] = [
    (Agent("openai_sdk"), "chat"),
    (Agent("openai_sdk"), "responses"),
    (Agent("anthropic_sdk"), "messages"),
    # Its client is openai_sdk's.
    pytest.param(Agent("openai_agents"), "chat", marks=pytest.mark.long),
    (Agent("openai_agents"), "responses"),
    (Agent("pydantic_ai_agent"), "chat"),
    # `test_frameworks.py` runs deepagents, which is an agent of LangGraph.
    pytest.param(Agent("langgraph_agent"), "chat", marks=pytest.mark.long),
    (Agent("smolagents_agent", frozenset({"foreign_assistant", "edited"})), "chat"),
]


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> RunningProxy:
    """With an engine that plays the task."""
    proxy = await start_proxy(max_context_tokens=131_072)  # full prompts, in a tiny vocabulary
    tokenizer = proxy.rendering.tokenizer
    proxy.engine.script = text_script(
        play,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
        end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    return proxy


def example(name: str, *more: str) -> CommandConfig:
    """The command of `examples/agents`, with `more` arguments."""
    loaded = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    command = CommandConfig.model_validate(loaded["remote_agent"]["command"])
    return command.model_copy(update={"argv": (*command.argv, *more)})


async def trial(
    proxy: RunningProxy | ProxyClient,
    command: CommandConfig,
    folder: Path,
    prompt: str = PROMPT,
    *,
    kind: SessionKind = SessionKind.TRAIN,
    programs: Path = AGENTS / "bin",
    sampling: SamplingConfig | None = None,
    timeout_s: float = 120,
    check: Sequence[str] = ("grep", "-qx", "hi", "out.txt"),
    origin: Origin | None = None,
) -> Rollout:
    """`check`: the verifier's command. `origin`: the recorded turns that the trial begins with."""
    path = f"{programs}:{os.environ['PATH']}"
    env = {"PATH": path, **command.env}
    verifier = VerifierConfig(argv=tuple(check))
    loop = RemoteAgentLoop(
        proxy if isinstance(proxy, ProxyClient) else proxy.control,
        CommandLauncher(CommandConfig(argv=("env", *command.argv), env=env)),
        Verifier(verifier),
        folder,
        sampling=sampling,
        trial=TrialConfig(timeout_s=timeout_s, max_retries=0, keep_workspaces=True),
    )
    try:
        return await loop.run(Task("hi", {"prompt": prompt}), kind=kind, origin=origin)
    finally:
        await loop.close()


def assert_exact(rollout: Rollout, agent: Agent, proxy: RunningProxy) -> None:
    log = (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    assert rollout.reward == 1.0, log
    assert rollout.num_turns >= agent.turns
    assert set(rollout.forks) <= agent.causes, rollout.forks
    assert rollout.metrics["cut_turns"] == 0
    sampled = [call.answer_ids for call in proxy.engine.calls]
    assert rollout.sampled_tokens == sum(map(len, sampled))
    paths = [trajectory.ids.tolist() for trajectory in flatten(rollout.segments)]
    for call in proxy.engine.calls:
        assert any(path[: len(call.path)] == call.path for path in paths)


@pytest.mark.parametrize("agent", EXAMPLE_AGENTS, ids=lambda agent: agent.name)
async def test_agent_finishes_its_task_and_leaves_an_exact_record(
    agent: Agent, proxy: RunningProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of the user may wait for a lock that the killed shell of an earlier agent left
    behind, so that the agent's shell should not run it."""
    home = tmp_path / "home"
    if not agent.reads_profile:
        home.mkdir()
        for profile in (".profile", ".bashrc", ".bash_profile"):
            (home / profile).write_text(f"touch {home}/ran\n")
        monkeypatch.setenv("HOME", str(home))
    rollout = await trial(proxy, example(agent.name), tmp_path / "trial")
    assert_exact(rollout, agent, proxy)
    assert not (home / "ran").exists()


@pytest.mark.parametrize("name", ["claude_code", pytest.param("opencode", marks=pytest.mark.long)])
async def test_first_prompts_of_two_trials_are_the_same(
    name: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    """Both name their working folder in their system prompts, before the tools."""
    starts = []
    for _ in range(2):
        rollout = await trial(proxy, example(name), tmp_path)
        assert rollout.reward == 1.0, rollout.error
        _, turns = await proxy.control.get_turns(rollout.trial_id)
        starts.append(turns[0].prompt_ids.tolist())
    one, other = starts
    assert common_prefix(np.array(one), np.array(other)) == len(one) == len(other)


@installed("aider")
async def test_aider_asks_again_when_its_test_fails(proxy: RunningProxy, tmp_path: Path) -> None:
    """It omits its reminder of the format when it sends its history again, so the second call
    forks."""
    tested = example("aider", "--auto-test", "--test-cmd", "grep -qx hi out.txt")
    rollout = await trial(proxy, tested, tmp_path)
    assert_exact(rollout, Agent("aider", frozenset({"new_conversation"}), turns=2), proxy)


@pytest.mark.parametrize(
    ("agent", "dialect"), SDK_AGENTS, ids=lambda each: str(getattr(each, "name", each))
)
async def test_sdk_finishes_its_task_and_leaves_an_exact_record(
    agent: Agent, dialect: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    script = str(SCRIPTS / f"{agent.name}.py")
    command = CommandConfig(
        argv=(str(AGENTS / "python/bin/python"), script), env={"DIALECT": dialect}
    )
    rollout = await trial(proxy, command, tmp_path)
    assert_exact(rollout, agent, proxy)
