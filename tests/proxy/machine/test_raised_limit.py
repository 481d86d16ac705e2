"""Servers and the trainer raise their soft limit of open files; agents have the user's."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import yaml

from proxy.machine.open_files import RESERVED
from tests.attacks.server import Server, family, running_server
from tests.attacks.victim import ADMIN_KEY
from tests.needs import needs
from tests.proxy.checkpoint import write_checkpoint

SOFT, CONNECTIONS = 256, 400
HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
LOW = f"the hard limit of open files is {HARD}" if 0 <= HARD < 2 * CONNECTIONS + RESERVED else None
pytestmark = needs(LOW)
LIMITED = ("tests.proxy.machine.limited", str(SOFT))
HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"

RUNS_AN_AGENT = """
import asyncio, resource, sys
from pathlib import Path
from agent_loop.processes.host import ProcessHost
from tests.agent_loop.processes.test_host import job
from trainer.cli import main

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), hard))
try:
    main(["--version"])
except SystemExit:
    pass
code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
asyncio.run(ProcessHost().run(job(Path(sys.argv[1]), code)))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def soft_limit(pid: int) -> str:
    limits = Path(f"/proc/{pid}/limits").read_text()
    found = re.search(r"^Max open files +(\S+) +(\S+)", limits, re.M)
    assert found is not None
    assert found[1] == found[2]
    return found[1]


@asynccontextmanager
async def proxy(folder: Path, workers: int) -> AsyncIterator[Server]:
    checkpoint, config = write_checkpoint(folder / "model"), folder / "proxy.yaml"
    settings = {
        "model": str(checkpoint),
        "port": 0,
        "engines": [{"url": "http://127.0.0.1:9"}],
        "store": f"sqlite:///{folder}/sessions.db",
        "workers": workers,
    }
    config.write_text(yaml.safe_dump(settings))
    serve = (*LIMITED, "proxy", "serve", "--config", str(config))
    async with running_server(
        *serve, log=folder / "proxy.log", AGENTIC_PROXY_ADMIN_KEY=ADMIN_KEY
    ) as server:
        yield server


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[Server]:
    serve = ("tests.agent_loop.extras.swarm.serve_process", "127.0.0.1:0", str(folder), "true")
    async with running_server(*LIMITED, *serve, log=folder / "server.log") as server:
        yield server


async def answered(server: Server, connections: int) -> int:
    """Number of the connections, all open at the same time, on which `/health` is answered."""
    async with AsyncExitStack() as closed:
        opened = []
        for _ in range(connections):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            closed.callback(writer.close)
            opened.append((reader, writer))
        found = 0
        for reader, writer in opened:
            writer.write(HEALTH % server.port)
            found += (await reader.readline()).startswith(b"HTTP/1.1 200")
        return found


@pytest.mark.parametrize("server", ["proxy", "workers", "swarm"])
async def test_server_has_more_connections_than_its_soft_limit(tmp_path: Path, server: str) -> None:
    start = swarm(tmp_path) if server == "swarm" else proxy(tmp_path, 1 + (server == "workers"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))
    async with start as running:
        limits = {pid: soft_limit(pid) for pid in family(running.pid)}
        assert set(limits.values()) == {soft_limit(os.getpid())}
        assert len(limits) == (3 if server == "workers" else 1)
        assert await answered(running, CONNECTIONS) == CONNECTIONS


def test_trainer_raises_its_limit_and_its_agents_have_the_users(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", RUNS_AN_AGENT, str(tmp_path), str(SOFT)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1].split() == [str(HARD)] * 2
    assert (tmp_path / "log").read_text().split() == [str(SOFT), str(HARD)]
