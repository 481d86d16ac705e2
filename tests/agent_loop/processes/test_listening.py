"""Which ports count as a run's own: those of its processes, and not those of its agents."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.processes import listening
from agent_loop.processes.host import ProcessHost
from agent_loop.processes.listening import ListeningPorts
from proxy import wall
from proxy.wall import Wall
from tests.agent_loop.launchers.test_command import until
from tests.agent_loop.processes.test_host import job

REFUSED = wall.missing()
LISTEN = """
import pathlib, socket, sys, time
server = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else 2)
pathlib.Path("port.new").write_text(str(server.getsockname()[1]))
pathlib.Path("port.new").rename("port")
"""
WAIT = "while not pathlib.Path('end').exists(): time.sleep(0.01)\n"
PYTHON = (sys.prefix, sys.base_prefix)


def test_ports_of_this_process_and_of_its_descendants_are_found(tmp_path: Path) -> None:
    ports = ListeningPorts([os.getpid()])
    with socket.create_server(("127.0.0.1", 0)) as own:
        assert own.getsockname()[1] in ports.now()
        code = LISTEN + "print(flush=True); sys.stdin.read()"
        with subprocess.Popen(
            ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code, "::1"],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            found = ports.now()
            child.communicate()
        of_child = int((tmp_path / "port").read_text())
        assert {own.getsockname()[1], of_child} <= found
    assert of_child not in ports.now()


def test_sockets_by_netlink_are_those_of_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as second,
        socket.create_connection(first.getsockname()),
    ):
        found = listening.listening_sockets()
        assert {first.getsockname()[1], second.getsockname()[1]} <= set(found.values())
        monkeypatch.setattr(listening, "NETLINK_SOCK_DIAG", 31)  # a protocol that no kernel has
        assert listening.listening_sockets() == found


def test_sockets_are_read_from_proc_if_the_kernel_cannot_list_those_of_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its list is then empty and ends with an error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(socket, "IPPROTO_TCP", 253)  # a protocol that no kernel has
        assert server.getsockname()[1] in listening.listening_sockets().values()


def test_sockets_of_many_processes_need_several_replies() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(600)]
        wanted = {server.getsockname()[1] for server in servers}
        assert wanted <= set(listening.listening_sockets().values())


def test_socket_that_another_process_took_over_is_found_again(tmp_path: Path) -> None:
    """The sockets are the same, and only their owner has changed."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        code = "import socket, sys; socket.recv_fds(socket.socket(fileno=3), 1, 1); input()"
        argv = [sys.executable, "-c", code.replace("fileno=3", f"fileno={theirs.fileno()}")]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]) as child:
            of_child = ListeningPorts([child.pid], kept_s=0.0)
            port = server.getsockname()[1]
            assert port not in of_child.now()
            socket.send_fds(ours, [b"s"], [server.fileno()])
            while port not in of_child.now():
                assert child.poll() is None
            child.communicate(b"\n")


@pytest.mark.skipif(REFUSED is not None, reason=f"this machine refuses namespaces: {REFUSED}")
async def test_port_of_an_agent_behind_a_wall_is_not_one_of_the_run(tmp_path: Path) -> None:
    host = ProcessHost()
    agent = job(tmp_path, LISTEN + WAIT, "127.0.0.1")
    running = asyncio.ensure_future(
        host.run(replace(agent, wall=Wall(hide=(), show=PYTHON), visible=(tmp_path,)))
    )
    await until((tmp_path / "port").exists)
    port = int((tmp_path / "port").read_text())
    with socket.create_connection(("127.0.0.1", port)):
        assert port not in ListeningPorts([os.getpid()]).now()
    (tmp_path / "end").touch()
    assert (await running).failure is None
    await host.close()
