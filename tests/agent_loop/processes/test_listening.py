"""Which ports count as a run's own: those of its processes, and not those of its agents."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_loop.processes.host import ProcessHost
from agent_loop.processes.listening import listening_ports
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


def test_ports_of_this_process_and_of_its_descendants_are_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        code = LISTEN + "print(flush=True); sys.stdin.read()"
        with subprocess.Popen(
            ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code, "::1"],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            found = listening_ports([os.getpid()])
            child.communicate()
        of_child = int((tmp_path / "port").read_text())
        assert {own.getsockname()[1], of_child} <= found
    assert of_child not in listening_ports([os.getpid()])


@pytest.mark.skipif(REFUSED is not None, reason=f"this machine refuses namespaces: {REFUSED}")
async def test_port_of_an_agent_behind_a_wall_is_not_one_of_the_run(tmp_path: Path) -> None:
    host = ProcessHost()
    agent = job(tmp_path, LISTEN + WAIT, "127.0.0.1")
    running = asyncio.ensure_future(
        host.run(replace(agent, wall=Wall(hide=()), visible=(tmp_path,)))
    )
    await until((tmp_path / "port").exists)
    port = int((tmp_path / "port").read_text())
    with socket.create_connection(("127.0.0.1", port)):
        assert port not in listening_ports([os.getpid()])
    (tmp_path / "end").touch()
    assert (await running).failure is None
    await host.close()
