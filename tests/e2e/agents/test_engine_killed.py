"""Real agents do not notice that their engine dies in the middle of every answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_loop.records import RolloutStatus
from agent_loop.trajectory import flatten
from proxy.records import TurnStatus
from proxy.testing.scripted_engine import Fault, text_script
from tests.e2e.agents.model import play
from tests.e2e.agents.test_agents import AGENTS, example, trial
from tests.needs import needs
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.continued import Continued

NAMES = [
    "claude_code",
    "codex",
    "qwen_code",
    "mini_swe_agent",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("codex_0_77", "opencode", "pi")),
]
"""In CI one agent of each dialect, and one that does not stream: what an engine's death needs is
the dialect's writer."""
PERCENT = [pytest.param(10, marks=pytest.mark.long), 60, pytest.param(95, marks=pytest.mark.long)]

pytestmark = [
    pytest.mark.agents,
    needs(None if (AGENTS / ".ready").exists() else f"no {AGENTS}: make agents"),
]


def play_and_die(proxy: RunningProxy, percent: int) -> Continued:
    """An engine that solves the task, and whose connection breaks once in every answer."""
    tokenizer = proxy.rendering.tokenizer
    continued = Continued(
        text_script(
            play,
            decode=tokenizer.decode,
            encode=tokenizer.encode,
            end_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
        )
    )

    def script(prompt_ids: list[int]) -> list[int]:
        known = len(continued.answers)
        answer = list(continued(prompt_ids))
        if len(continued.answers) > known:
            call = next(c for c in reversed(proxy.engine.calls) if c.prompt_ids == prompt_ids)
            call.fault = Fault("die", after_tokens=max(1, len(answer) * percent // 100))
        return answer

    proxy.engine.script = script
    return continued


@pytest.mark.parametrize("percent", PERCENT)
@pytest.mark.parametrize("name", NAMES)
async def test_agent_finishes_its_task_when_its_engine_dies_in_every_answer(
    name: str, percent: int, start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(max_context_tokens=131_072)
    continued = play_and_die(proxy, percent)

    rollout = await trial(proxy, example(name), tmp_path)

    log = (Path(rollout.logs or os.devnull) / "agent.log").read_text(errors="replace")[-3000:]
    assert rollout.status is RolloutStatus.DONE, f"{rollout.error}\n{log}"
    assert rollout.reward == 1.0, log
    assert not rollout.forks
    _, turns = await proxy.control.get_turns(rollout.trial_id)
    assert {turn.status for turn in turns} == {TurnStatus.DONE}
    assert len(proxy.engine.calls) >= 2 * len(continued.answers)
    assert len(turns) == len(continued.answers)
    paths = [trajectory.ids.tolist() for trajectory in flatten(rollout.segments)]
    for prompt, answer in continued.answers.items():
        whole = [*prompt, *answer]
        assert any(path[: len(whole)] == whole for path in paths)
