"""A real Claude Code whose calls are paused until the engine's KV cache has room."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_loop.records import RolloutStatus
from proxy.engines.http_engine import HttpEngine
from proxy.records import TurnStatus
from proxy.testing.scripted_engine import ScriptedEngine
from tests.e2e.agents.model import play
from tests.e2e.agents.test_agents import example, pytestmark, trial
from tests.proxy.conftest import StartProxy
from tests.proxy.serving.test_paused_calls import CACHE_TOKENS, filled

__all__ = ["pytestmark"]


@pytest.mark.parametrize("paused_s", [0, pytest.param(600, marks=pytest.mark.long)])
async def test_claude_code_goes_on_after_its_first_call_was_paused(
    start_proxy: StartProxy, tmp_path: Path, paused_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep-alives come during the pause; afterwards every token is as the engine sampled it."""
    # The call that fills the cache stands still for longer than an engine may.
    defaults = HttpEngine.__init__.__kwdefaults__
    assert defaults
    monkeypatch.setitem(defaults, "stall_timeout_s", 3600.0)
    async with ScriptedEngine(lambda _: [], cache_tokens=CACHE_TOKENS) as engine:
        full = await filled(start_proxy, engine, max_wait_s=3600, limits={"keep_alive_s": 1})
        full.proxy.answers(play)
        paused = asyncio.create_task(
            # A call is paused for at most a tenth of the time that its trial has left.
            trial(full.proxy, example("claude_code"), tmp_path, timeout_s=7200)
        )
        await full.until_paused()
        await asyncio.sleep(paused_s)
        assert len(engine.calls) == 1
        await full.free()
        rollout = await paused
    log = (Path(rollout.logs or "") / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    assert rollout.reward == 1.0, log
    _, turns = await full.proxy.control.get_turns(rollout.trial_id)
    assert all(turn.status is TurnStatus.DONE for turn in turns), [turn.status for turn in turns]
    assert rollout.sampled_tokens == sum(len(call.answer_ids) for call in engine.calls[1:])
