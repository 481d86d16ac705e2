"""Sessions of several conversations, run again to each of their turns: parallel sub-agents,
compaction, answers that were cut; and `kill -9` of the proxy while such a session is replayed."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from agent_loop.launchers.command import CommandConfig
from agent_loop.records import Rollout, RolloutStatus
from proxy.client import ProxyClient
from proxy.records import Origin, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.testing.scripted_engine import Fault, ScriptedEngine, text_script
from tests.e2e.agents.model import play
from tests.e2e.agents.rewind.rewound import Answers, Rewinder
from tests.e2e.agents.test_agents import PROMPT, example, trial
from tests.e2e.agents.test_agents import pytestmark as needs_agents
from tests.e2e.agents.test_hard_cases import HAND_OUT, hands_out, summarises, without
from tests.e2e.agents.test_proxy_killed_during_tools import gate
from tests.e2e.test_proxy_killed import ADMIN_KEY, Proxy
from tests.proxy.conftest import StartProxy

pytestmark = [*needs_agents, pytest.mark.long]
CLAUDE = "claude_code"
OWN_FILES = partial(hands_out, work="echo {part} > {part}.txt")
SUB_AGENTS_TURNS = 7
"""Two of each sub-agent and three of the main agent."""


def with_sub_agents() -> CommandConfig:
    """Claude Code, whole."""
    return without(example(CLAUDE), "--bare")


@pytest.mark.parametrize(
    ("command", "prompt", "script", "faults", "context_tokens"),
    [
        pytest.param(with_sub_agents(), HAND_OUT, OWN_FILES, [], 131_072, id="sub-agents"),
        pytest.param(example(CLAUDE), PROMPT, summarises, [], 16_000, id="compaction"),
        *(
            pytest.param(example(name), PROMPT, play, [Fault("die", 6)], 131_072, id=f"cut-{name}")
            for name in (CLAUDE, "codex", "opencode")
        ),
    ],
)
async def test_session_of_several_conversations_is_rewound_to_every_turn(
    command: CommandConfig,
    prompt: str,
    script: Answers,
    faults: list[Fault],
    context_tokens: int,
    start_proxy: StartProxy,
    tmp_path: Path,
) -> None:
    proxy = await start_proxy(max_context_tokens=context_tokens, limits={"engine_patience_s": 0})

    async def run(origin: Origin | None) -> Rollout:
        if origin is None:
            proxy.engine.faults.extend(faults)
        return await trial(proxy, command, tmp_path / "trials", prompt, origin=origin)

    rewinder = Rewinder(proxy, run, tmp_path / "trials", script)
    parent = await rewinder.record()
    assert parent.rollout.status is RolloutStatus.DONE, parent.rollout.error
    statuses = Counter(turn.status for turn in parent.turns)
    assert statuses[TurnStatus.CUT] == len(faults)
    causes = Counter(turn.fork_cause for turn in parent.turns)
    for turn in range(1, len(parent.turns) + 1):
        again = await rewinder.rerun(parent, turn)
        assert again.reached, again
        assert again.early_calls == 0, again
        assert again.branch.final == parent.final, again
        branch = again.branch
        assert set(branch.states) == {branch.prompt(t.index) for t in branch.turns[turn:]}, again
        assert [t.session_id for t in branch.turns[:turn]] == [parent.rollout.trial_id] * turn
        assert Counter(t.fork_cause for t in branch.turns) <= causes, again


async def test_proxy_killed_while_sub_agents_are_replayed(
    rendering: Rendering, checkpoint: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    """The tool of one sub-agent waits while the proxy is killed and started again."""
    began, go_on, command = gate(tmp_path, with_sub_agents())
    work = f"test {{part}} = TWO || {{{{ echo > {began}; cat {go_on}; }}}}; echo {{part}} >> parts"
    script = text_script(
        lambda prompt: hands_out(prompt, work),
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=[rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")],
    )
    async with ScriptedEngine(script) as engine:
        proxy = Proxy(tmp_path, checkpoint, engine.url, unused_tcp_port, max_context_tokens=131_072)
        await proxy.start()

        async def run(origin: Origin | None) -> Rollout:
            async with ProxyClient(proxy.url, ADMIN_KEY) as control:
                trials = tmp_path / "trials"
                running = asyncio.create_task(
                    trial(control, command, trials, HAND_OUT, origin=origin)
                )
                await asyncio.to_thread(began.read_text)
                if origin is not None:
                    await proxy.kill()
                    await proxy.start()
                await asyncio.to_thread(go_on.write_text, "go on\n")
                return await running

        try:
            parent = await run(None)
            for turn in (4, 6):  # within the replayed part, and at its end
                engine.calls.clear()
                branch = await run(Origin(parent.trial_id, turn))
                async with ProxyClient(proxy.url, ADMIN_KEY) as control:
                    _, turns = await control.get_turns(branch.trial_id)
                    shown = await control.show(branch.trial_id)
                assert shown["replay"]["diverged"] == []
                assert [t.session_id for t in turns[:turn]] == [parent.trial_id] * turn
                assert len(turns) == SUB_AGENTS_TURNS
                assert len(engine.calls) == SUB_AGENTS_TURNS - turn
                written = (Path(branch.logs or "") / "work" / "parts").read_text()
                assert Counter(written.split()) == {"ONE": 1, "TWO": 1}
        finally:
            await proxy.stop()
