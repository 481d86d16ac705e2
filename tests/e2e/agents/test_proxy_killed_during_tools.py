"""`kill -9` of the proxy while a real agent runs a tool.

The tool's result reaches a proxy that has nothing in memory, or at first none at all, and continues
the same path.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import RolloutStatus
from agent_loop.trajectory import flatten
from proxy.client import ProxyClient
from proxy.records import TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from tests.e2e.agents.model import play
from tests.e2e.agents.test_agents import example, trial
from tests.e2e.agents.test_agents import pytestmark as needs_agents
from tests.e2e.test_proxy_killed import ADMIN_KEY, Proxy

pytestmark = needs_agents
NAMES = [
    "claude_code",
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in ("codex", "opencode", "opencode_messages", "qwen_code", "pi", "mini_swe_agent")
    ),
]
TURNS = 3


def gate(folder: Path, command: CommandConfig) -> tuple[Path, Path, CommandConfig]:
    """Two pipes, and the command with an environment that names their folder, so that the agent's
    tools see them behind its wall."""
    gates = folder / "gates"
    gates.mkdir()
    began, go_on = gates / "began", gates / "go-on"
    os.mkfifo(began)
    os.mkfifo(go_on)
    return began, go_on, command.model_copy(update={"env": {**command.env, "GATES": str(gates)}})


@pytest.mark.parametrize("name", NAMES)
async def test_proxy_that_is_killed_while_an_agent_runs_a_tool_continues_its_path(
    name: str, rendering: Rendering, checkpoint: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    began, go_on, command = gate(tmp_path, example(name))
    wait = f"echo > {began}; cat {go_on}; "
    commands = (f"{wait}echo hi > out.txt", f"{wait}cat out.txt")
    script = text_script(
        partial(play, commands=commands),
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=[rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    async with ScriptedEngine(script) as engine:
        proxy = Proxy(tmp_path, checkpoint, engine.url, unused_tcp_port, max_context_tokens=131_072)
        await proxy.start()
        try:
            async with ProxyClient(proxy.url, ADMIN_KEY) as control:
                running = asyncio.create_task(trial(control, command, tmp_path / "trials"))
                await asyncio.to_thread(began.read_text)
                await proxy.kill()
                await proxy.start()
                await asyncio.to_thread(go_on.write_text, "go on\n")
                await asyncio.to_thread(began.read_text)
                await proxy.kill()
                await asyncio.to_thread(go_on.write_text, "go on\n")  # then nobody listens
                await proxy.start()
                rollout = await running
                _, turns = await control.get_turns(rollout.trial_id)
        finally:
            await proxy.stop()
        log = (Path(rollout.logs or os.devnull) / "agent.log").read_text(errors="replace")[-3000:]
        assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
        assert rollout.reward == 1.0, log
        assert not rollout.forks
        assert [turn.status for turn in turns] == [TurnStatus.DONE] * TURNS
        assert len(engine.calls) == TURNS
        (path,) = [trajectory.ids.tolist() for trajectory in flatten(rollout.segments)]
        assert all(path[: len(call.path)] == call.path for call in engine.calls)
        assert rollout.sampled_tokens == sum(len(call.answer_ids) for call in engine.calls)
