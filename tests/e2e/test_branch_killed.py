"""`kill -9` of the proxy while a branch is replayed, and while it is sampled.

The agent runs with an unmodified SDK, which calls again by itself. The next proxy has nothing in
memory: it replays what is left of the recording, and continues the recorded path after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.client import ProxyClient, SessionHandle
from proxy.records import Origin, Turn, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.testing.scripted_engine import Fault, ScriptedEngine, text_script
from tests.e2e.patient_agent import TURNS
from tests.e2e.test_proxy_killed import ADMIN_KEY, Proxy, start_agent
from tests.proxy.conftest import checkpoint as checkpoint
from tests.proxy.conftest import rendering as rendering

pytestmark = [pytest.mark.programs, pytest.mark.slow]
REPLAYED = 2
"""Turns of the recording that the branch replays; the next TURNS - REPLAYED are sampled."""


@pytest.fixture
async def engine(rendering: Rendering) -> AsyncIterator[ScriptedEngine]:
    script = text_script(
        lambda prompt: f"That is {len(prompt)} characters.",
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=rendering.stop_token_ids[:1],
    )
    async with ScriptedEngine(script, expect_extension=True) as engine:
        yield engine


async def record(control: ProxyClient) -> list[Turn]:
    session = await control.create_session("recorded")
    await run(session)
    _, turns = await control.get_turns("recorded")
    assert len(turns) == TURNS
    return turns


async def run(session: SessionHandle, proxy: Proxy | None = None, kill_after: int = -1) -> None:
    """Runs the agent; the proxy is killed after its turn `kill_after`."""
    agent = await start_agent(session)
    assert agent.stdin is not None
    assert agent.stdout is not None
    for turn in range(TURNS):
        assert await agent.stdout.readline() == f"{turn + 1}\n".encode()
        if proxy is not None and turn == kill_after:
            await proxy.kill()
            agent.stdin.write(b"go on\n")  # it calls while no proxy listens
            await proxy.start()
        else:
            agent.stdin.write(b"go on\n")
    assert await agent.wait() == 0


@pytest.mark.parametrize(
    ("kill_after", "salvage"),
    [
        (0, True),
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(2, False, marks=pytest.mark.long),
    ],
)
async def test_branch_goes_on_after_its_proxy_was_killed(
    engine: ScriptedEngine,
    checkpoint: Path,
    tmp_path: Path,
    unused_tcp_port: int,
    kill_after: int,
    salvage: bool,
) -> None:
    """Killed after turn 0: within the replayed part; after turn 1: at its end; later: when
    sampled turns were recorded."""
    proxy = Proxy(tmp_path, checkpoint, engine.url, unused_tcp_port)
    await proxy.start()
    try:
        async with ProxyClient(proxy.url, ADMIN_KEY) as control:
            recorded = await record(control)
            engine.calls.clear()
            origin = Origin("recorded", REPLAYED, salvage=salvage)
            branch = await control.branch(origin, "branch")
            await run(branch, proxy, kill_after)
            await control.complete("branch")
            _, turns = await control.get_turns("branch")
            shown = await control.show("branch")
    finally:
        await proxy.stop()
    assert engine.violations == []
    assert len(engine.calls) == TURNS - REPLAYED
    first = TurnStatus.DONE if salvage else TurnStatus.CONTEXT
    assert [t.status for t in turns] == [first] * REPLAYED + [TurnStatus.DONE] * (TURNS - REPLAYED)
    assert [t.session_id for t in turns[:REPLAYED]] == ["recorded"] * REPLAYED
    assert [t.fork_cause for t in turns] == [None] * TURNS
    assert [t.parent for t in turns] == [None, *range(TURNS - 1)]
    for own, before in zip(turns, recorded, strict=True):
        assert own.sampled_ids.tolist() == before.sampled_ids.tolist()
    assert shown["replay"] == {"turns": list(range(REPLAYED)), "diverged": []}


async def test_proxy_killed_within_a_live_answer_of_a_branch_samples_it_again(
    engine: ScriptedEngine, checkpoint: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    proxy = Proxy(tmp_path, checkpoint, engine.url, unused_tcp_port)
    await proxy.start()
    try:
        async with ProxyClient(proxy.url, ADMIN_KEY) as control:
            recorded = await record(control)
            branch = await control.branch(Origin("recorded", REPLAYED), "branch")
            engine.calls.clear()
            engine.expect_extension = False  # nothing extends the answer that is cut
            engine.faults.append(Fault("stall", after_tokens=3))
            running = asyncio.create_task(run(branch))
            while not engine.calls:
                engine.called.clear()
                await engine.called.wait()
            await engine.calls[0].began.wait()
            await proxy.kill()
            await proxy.start()
            await running
            _, turns = await control.get_turns("branch")
    finally:
        await proxy.stop()
    assert len(engine.calls) == 1 + TURNS - REPLAYED
    assert engine.calls[0].prompt_ids == engine.calls[1].prompt_ids
    statuses = [t.status for t in turns]
    done = [TurnStatus.DONE] * (TURNS - REPLAYED)
    assert statuses == [TurnStatus.CONTEXT] * REPLAYED + [TurnStatus.CUT, *done]
    cut, again = turns[REPLAYED], turns[REPLAYED + 1]
    assert (again.parent, again.shared_tokens) == (cut.index, cut.prompt_tokens)
    assert again.sampled_ids.tolist() == recorded[REPLAYED].sampled_ids.tolist()
