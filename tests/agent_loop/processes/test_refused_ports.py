"""Jobs with a rule set are forked from a fork of the server, which has taken it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from agent_loop.errors import LaunchError
from agent_loop.processes.functions import function_host
from agent_loop.processes.host import Job, ProcessHost
from proxy import wall
from proxy.machine import landlock
from proxy.wall import Wall
from tests.agent_loop.processes.test_host import job

REFUSED = wall.missing() or landlock.missing()
pytestmark = pytest.mark.skipif(
    REFUSED is not None, reason=f"this machine refuses namespaces: {REFUSED}"
)
CONNECT = """
import socket, sys
for port in map(int, sys.argv[1:]):
    with socket.socket() as tried:
        print(port, tried.connect_ex(("127.0.0.1", port)) == 0)
"""
PYTHON = (sys.prefix, sys.base_prefix)


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        yield first.getsockname()[1], second.getsockname()[1]


@pytest_asyncio.fixture
async def host() -> AsyncIterator[ProcessHost]:
    made = ProcessHost()
    yield made
    await made.close()


async def reached(
    host: ProcessHost, folder: Path, ports: tuple[int, int], refused: set[int] | None
) -> set[int]:
    """The ports that an agent reaches. `refused`: None for an agent without a wall."""
    folder.mkdir(exist_ok=True)
    behind = None if refused is None else Wall(hide=(), ports=frozenset(refused), show=PYTHON)
    agent = replace(job(folder, CONNECT, *map(str, ports)), wall=behind, visible=(folder,))
    ended = await host.run(agent)
    assert ended.failure is None, agent.log.read_text()
    lines = [line.split() for line in agent.log.read_text().splitlines()]
    return {int(port) for port, ok in lines if ok == "True"}


async def test_each_job_has_its_own_rule_set(
    host: ProcessHost, ports: tuple[int, int], tmp_path: Path
) -> None:
    first, second = ports
    for number, refused in enumerate(({first}, {second}, {first, second}, set(), None, {first})):
        found = await reached(host, tmp_path / str(number), ports, refused)
        assert found == set(ports) - (refused or set())


async def test_concurrent_jobs_with_and_without_rules(
    host: ProcessHost, ports: tuple[int, int], tmp_path: Path
) -> None:
    wanted = [{ports[0]}, {ports[1]}, None] * 6
    jobs = (
        reached(host, tmp_path / str(number), ports, refused)
        for number, refused in enumerate(wanted)
    )
    assert await asyncio.gather(*jobs) == [set(ports) - (refused or set()) for refused in wanted]


async def test_killed_restricted_server_is_replaced(
    host: ProcessHost, ports: tuple[int, int], tmp_path: Path
) -> None:
    assert await reached(host, tmp_path, ports, {ports[0]}) == {ports[1]}
    assert host._server is not None
    server = host._server.pid
    (restricted,) = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    os.kill(restricted, signal.SIGKILL)
    found: set[int] | None = None
    while found is None:
        try:
            found = await reached(host, tmp_path, ports, {ports[0]})
        except LaunchError:  # the request was sent before its end was noticed
            continue
    assert found == {ports[1]}


async def test_restricted_server_ends_with_its_server(
    host: ProcessHost, ports: tuple[int, int], tmp_path: Path
) -> None:
    await reached(host, tmp_path, ports, {ports[0]})
    assert host._server is not None
    server = host._server.pid
    (restricted,) = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    ended = os.pidfd_open(restricted)
    await host.close()
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(ended, readable.set)
    await asyncio.wait_for(readable.wait(), 30)
    loop.remove_reader(ended)
    os.close(ended)


async def test_rule_set_that_cannot_be_taken_is_an_error_of_the_job(
    host: ProcessHost, ports: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rules(ports: frozenset[int]) -> int:
        return os.memfd_create("no rules")

    with monkeypatch.context() as patched:
        patched.setattr(landlock, "refuse_ports", no_rules)
        for _ in range(2):
            with pytest.raises(LaunchError, match="cannot refuse ports"):
                await reached(host, tmp_path, ports, {ports[0]})
        assert await reached(host, tmp_path, ports, None) == set(ports)
    assert await reached(host, tmp_path, ports, {ports[1]}) == {ports[0]}
    assert await reached(host, tmp_path, ports, set()) == set(ports)


async def test_function_inherits_none_of_the_servers_sockets(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    file = tmp_path / "links.py"
    file.write_text(
        "import os\n"
        "def show(call):\n"
        "    paths = [f'/proc/self/fd/{fd}' for fd in os.listdir('/proc/self/fd')]\n"
        "    print('links', [os.readlink(path) for path in paths if os.path.islink(path)])\n"
    )
    host = function_host(dict, f"{file}:show")
    for refused in ({ports[0]}, set(), {ports[0]}, {ports[1]}):
        agent = Job(
            argv=(),
            call={"argument": {}, "result": str(tmp_path / "returned.json")},
            cwd=tmp_path,
            env=dict(os.environ),
            log=tmp_path / "log",
            timeout_s=60.0,
            wall=Wall(hide=(), ports=frozenset(refused), show=PYTHON),
            visible=(tmp_path,),
        )
        assert (await host.run(agent)).failure is None
        links = agent.log.read_text()
        assert "links" in links
        assert "socket:" not in links
        assert "landlock" not in links
    await host.close()


async def test_cancelled_trial_leaves_no_descriptor_of_a_rule_set(
    host: ProcessHost, ports: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    made: list[int] = []

    def slowly(refused: Iterable[int]) -> int:
        begun.set()
        goes_on.wait()
        made.append(os.open(os.devnull, os.O_RDONLY))
        return made[0]

    monkeypatch.setattr(landlock, "refuse_ports", slowly)
    running = asyncio.ensure_future(reached(host, tmp_path / "cancelled", ports, {ports[0]}))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])
