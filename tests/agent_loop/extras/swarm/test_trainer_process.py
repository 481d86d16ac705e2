"""The trainer's process: starts and stops at the same time, and its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_loop.extras.swarm import EngineState, SwarmError
from agent_loop.extras.swarm.swarm import Swarm
from agent_loop.extras.swarm.table import EpisodeTable
from agent_loop.extras.swarm.trainer_process import TrainerProcess

RUNS = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
CRASHES = [sys.executable, "-I", "-S", "-c", "raise SystemExit(1)"]


@pytest_asyncio.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    made = Swarm(EpisodeTable(tmp_path))
    await made.open()
    yield made
    await made.close()


def trainer(swarm: Swarm, command: list[str], folder: Path) -> TrainerProcess:
    made = TrainerProcess(swarm, command, (), folder / "trainer.log")
    made.url = made.key = "unused"
    return made


async def test_stop_during_a_start_ends_the_trainer(swarm: Swarm, tmp_path: Path) -> None:
    engine = trainer(swarm, RUNS, tmp_path)
    starting = asyncio.create_task(engine.start(await swarm.begin()))
    await asyncio.sleep(0)
    await engine.stop()
    await starting
    try:
        assert engine._process is None
        assert swarm.state is EngineState.OFFLINE
    finally:
        await engine.stop()


async def test_stop_before_a_start_prevents_it(swarm: Swarm, tmp_path: Path) -> None:
    engine = trainer(swarm, RUNS, tmp_path)
    run_dir = await swarm.begin()
    await engine.stop()
    try:
        with pytest.raises(SwarmError, match="stopped"):
            await engine.start(run_dir)
    finally:
        await engine.stop()


async def test_stop_waits_until_the_end_of_a_crashed_trainer_is_dealt_with(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise this end would disconnect the next trainer."""
    ended, goes_on = asyncio.Event(), asyncio.Event()
    real = swarm.trainer_ended

    async def slowly(state: EngineState, detail: str) -> None:
        ended.set()
        await goes_on.wait()
        await real(state, detail)

    monkeypatch.setattr(swarm, "trainer_ended", slowly)
    engine = trainer(swarm, CRASHES, tmp_path)
    await engine.start(await swarm.begin())
    await ended.wait()
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    goes_on.set()
    await stopping
    assert swarm.state is EngineState.OFFLINE


async def test_end_of_the_training_is_noticed_although_the_disk_is_full(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(name: str, value: str) -> None:
        raise SwarmError("the swarm's database: disk full", "unavailable")

    engine = trainer(swarm, [sys.executable, "-I", "-S", "-c", ""], tmp_path)
    run_dir = await swarm.begin()
    monkeypatch.setattr(swarm._table, "remember", refused)
    await engine.start(run_dir)
    assert engine._watch is not None
    await asyncio.wait([engine._watch])
    assert swarm.state is EngineState.DONE


async def test_states_after_a_restart_tell_a_killed_server_from_a_done_and_a_stopped_one(
    tmp_path: Path,
) -> None:
    async def after(command: list[str] | None, folder: Path, *, stopped: bool) -> EngineState:
        """The state that a restarted server has, whose predecessor's trainer ran `command`."""
        first, second = Swarm(EpisodeTable(folder)), Swarm(EpisodeTable(folder))
        await first.open()
        if command is not None:
            engine = trainer(first, command, folder)
            await engine.start(await first.begin())
            if stopped:
                await engine.stop()
            elif engine._watch is not None:
                await asyncio.wait([engine._watch])
        else:
            await first.begin()
        await first.close()
        await second.open()
        await second.close()
        return second.state

    quick = [sys.executable, "-I", "-S", "-c", ""]
    for name in ("killed", "done", "failed", "stopped"):
        (tmp_path / name).mkdir()
    assert await after(None, tmp_path / "killed", stopped=False) is EngineState.INTERRUPTED
    assert await after(quick, tmp_path / "done", stopped=False) is EngineState.DONE
    assert await after(CRASHES, tmp_path / "failed", stopped=False) is EngineState.ERROR
    assert await after(RUNS, tmp_path / "stopped", stopped=True) is EngineState.OFFLINE
