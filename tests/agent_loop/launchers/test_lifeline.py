"""Lifelines between a launcher (this process) and a node's worker (a process that may be suspended
or killed at any moment)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_loop.errors import LaunchError
from agent_loop.launchers.lifeline import TOKEN_BYTES, Lifeline, LifelineAddress, LifelineListener
from tests.agent_loop.launchers.test_command import alive, until

HOST = "127.0.0.1"
LIMIT_S = 300.0
"""More than an end takes on a busy machine."""
WORKER = """
import asyncio, os, sys, time
from pathlib import Path
from agent_loop.launchers.lifeline import LifelineAddress
from agent_loop.processes.host import ProcessHost
from tests.agent_loop.processes.test_host import job

host, port, token, folder, wait = sys.argv[1:]
line = LifelineAddress(host, int(port), bytes.fromhex(token)).connect()
Path(folder, "connected").touch()
while wait and not Path(folder, "go").exists():
    time.sleep(0.01)
code = "import os, time; open('agent.new', 'w').write(str(os.getpid()));"
code += "os.rename('agent.new', 'agent.pid'); time.sleep(600)"
try:
    ended = asyncio.run(ProcessHost().run(job(Path(folder), code, timeout_s=600), line))
except Exception as error:
    Path(folder, "refused").write_text(str(error))
"""


@pytest.fixture
async def listener() -> AsyncIterator[LifelineListener]:
    listener = LifelineListener()
    yield listener
    listener.close()


async def worker(line: Lifeline, folder: Path, wait: str = "") -> asyncio.subprocess.Process:
    """A worker that starts an agent, if `wait` is set when the file `go` exists."""
    address = line.address
    arguments = (address.host, str(address.port), address.token.hex(), str(folder), wait)
    return await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, *arguments)


async def test_agent_of_a_suspended_worker_is_ended(
    listener: LifelineListener, tmp_path: Path
) -> None:
    line = await listener.expect(HOST)
    process = await worker(line, tmp_path)
    assert await line.connected == HOST
    await until((tmp_path / "agent.pid").exists)
    process.send_signal(signal.SIGSTOP)
    try:
        assert await line.end(LIMIT_S)
        assert not alive(tmp_path / "agent.pid")
    finally:
        process.send_signal(signal.SIGCONT)
    await process.wait()


async def test_agent_that_has_not_started_before_its_end_never_starts(
    listener: LifelineListener, tmp_path: Path
) -> None:
    line = await listener.expect(HOST)
    process = await worker(line, tmp_path, wait="yes")
    await until((tmp_path / "connected").exists)
    assert not await line.end(0.1), "the worker holds the connection, and could start the agent"
    (tmp_path / "go").touch()
    await process.wait()
    assert (tmp_path / "refused").read_text().endswith("it was cancelled before it started")
    assert not (tmp_path / "agent.pid").exists()


async def test_agent_of_a_killed_worker_ends_and_its_end_is_known(
    listener: LifelineListener, tmp_path: Path
) -> None:
    line = await listener.expect(HOST)
    process = await worker(line, tmp_path)
    await until((tmp_path / "agent.pid").exists)
    process.kill()
    assert await line.end(LIMIT_S)
    assert not alive(tmp_path / "agent.pid")
    await process.wait()


async def test_end_is_awaited_also_by_a_cancelled_caller(
    listener: LifelineListener, tmp_path: Path
) -> None:
    line = await listener.expect(HOST)
    process = await worker(line, tmp_path)
    await until((tmp_path / "agent.pid").exists)
    ending = asyncio.create_task(line.end(LIMIT_S))
    await asyncio.sleep(0)
    ending.cancel()
    assert await ending
    assert not alive(tmp_path / "agent.pid")
    await process.wait()


async def test_withdrawn_and_unknown_agents_are_refused(listener: LifelineListener) -> None:
    line = await listener.expect(HOST)
    assert await line.end(0.0)
    unknown = LifelineAddress(HOST, line.address.port, os.urandom(TOKEN_BYTES))
    for address in (line.address, unknown):
        with pytest.raises(LaunchError, match="does not wait for this agent any more"):
            await asyncio.to_thread(address.connect)


async def test_launcher_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as closed:
        closed.bind((HOST, 0))
        port = closed.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot connect to the launcher at {HOST}:{port}"):
            LifelineAddress(HOST, port, b"0" * TOKEN_BYTES).connect()


async def test_agents_that_begin_at_the_same_time_share_one_port_that_is_closed() -> None:
    listener = LifelineListener()
    lines = await asyncio.gather(*(listener.expect("127.0.0.1") for _ in range(3)))
    assert len({line.address.port for line in lines}) == 1
    listener.close()
    for line in lines:
        with pytest.raises(LaunchError, match="cannot connect"):
            await asyncio.to_thread(line.address.connect)
