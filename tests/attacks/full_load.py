"""How long `/health` takes while a server has as much to do as it accepts.

    python -m tests.attacks.full_load --server proxy --calls 4096

The calls arrive at once, each on a connection of its own, and again until `/health` has answered
often enough: for the proxy, streams of an engine in
another process, conversations of thousands of messages, and bodies of many megabytes, while a
commit of the store takes long; for the swarm server, claims that wait, watchers, and episodes that
end with large reports. Another process requests `/health` all the time, each time on a new
connection.

What is bounded is the time from the request to its answer, less the time in which a thread of the
server and the asker could run and waited for a processor: a busy machine delays every program, and
no server can help that. What is left is the server's own: work that it does before it answers, and
files and locks that its event loop waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from agent_loop.extras.swarm import AsyncSwarmClient
from proxy.machine.open_files import raise_limit
from tests.attacks.server import Server, line_of, running_server
from tests.attacks.victim import ADMIN_KEY
from tests.proxy.checkpoint import write_checkpoint

BOUND_S = 1.0
INTERVAL_S = 0.1
ASKED = 10
"""Answers of `/health` while the calls run: these come again until there are so many."""
TOKEN_DELAY_S = 0.05
LONG_CALLS, LONG_MESSAGES = 1 / 64, 1500
LARGE_CALLS, LARGE_CHARS = 1 / 128, 12_000_000
"""Shares of the calls, and their sizes."""
TOKEN = "a-token-of-the-load"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answers:
    """Of `/health`. Example: Answers(count=512, worst_s=0.21, worst_wall_s=1.9)"""

    count: int
    worst_s: float
    """The longest, less what was waited for a processor."""
    worst_wall_s: float


def ask(host: str, port: int, pid: int) -> None:
    """Requests `/health` until standard input is closed; prints the Answers so far each time."""
    count, worst_s, worst_wall_s = 0, 0.0, 0.0
    request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode()
    while True:
        began, waits, own = time.monotonic(), _waits_s(pid), _waits_s(os.getpid())
        with socket.create_connection((host, port)) as connection:
            connection.sendall(request)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        wall_s = time.monotonic() - began
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"/health answered {answer[:200]!r}")
        late_s = wall_s - _longest_s(_waits_s(pid), waits) - _longest_s(_waits_s(os.getpid()), own)
        count, worst_s = count + 1, max(worst_s, late_s)
        worst_wall_s = max(worst_wall_s, wall_s)
        print(json.dumps([count, worst_s, worst_wall_s]), flush=True)
        if select.select([sys.stdin], [], [], INTERVAL_S)[0]:
            break


def _waits_s(pid: int) -> dict[str, float]:
    """For each thread, the seconds in which it could run and waited for a processor."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            found[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return found


def _longest_s(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """The longest wait of a thread: others wait at the same time, or for what it holds."""
    return max(waited - before.get(task, 0.0) for task, waited in now.items())


@asynccontextmanager
async def asked(server: Server) -> AsyncIterator[list[Answers]]:
    """A context in which `/health` is requested all the time; the list has an item for each answer:
    the Answers so far."""
    found: list[Answers] = []
    asker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attacks.full_load"),
        *("--ask", server.host, str(server.port), str(server.pid)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert asker.stdout is not None
    assert asker.stdin is not None

    async def read(printed: asyncio.StreamReader) -> None:
        async for line in printed:
            count, worst_s, worst_wall_s = json.loads(line)
            found.append(Answers(count, worst_s, worst_wall_s))

    try:
        found.append(Answers(*json.loads(await line_of(asker))))
        reading = asyncio.create_task(read(asker.stdout))
        yield found
    finally:
        asker.stdin.close()
        await asker.wait()
    await reading
    if asker.returncode:
        raise RuntimeError(f"the process that requests /health ended with {asker.returncode}")


@asynccontextmanager
async def proxy(folder: Path) -> AsyncIterator[Server]:
    """A proxy whose store is slow at times, and its engine, each a process."""
    checkpoint = write_checkpoint(folder / "model")
    engine = ("tests.attacks.engine_process", str(checkpoint), "0", str(TOKEN_DELAY_S))
    async with running_server(*engine, log=folder / "engine.log") as sampled:
        settings = {
            "model": str(checkpoint),
            "port": 0,
            "engines": [{"url": sampled.url}],
            "store": f"sqlite:///{folder}/sessions.db",
            "sessions": {"auto_create": True},
        }
        config = folder / "proxy.yaml"
        config.write_text(yaml.safe_dump(settings))
        serve = ("tests.attacks.slow_store", "serve", "--config", str(config))
        log = folder / "proxy.log"
        async with running_server(*serve, log=log, AGENTIC_PROXY_ADMIN_KEY=ADMIN_KEY) as server:
            yield server


def proxy_calls(server: Server, calls: int) -> Iterator[tuple[str, str, Body, Mapping[str, str]]]:
    """Method, URL, body and headers of each request."""
    turns = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "This."}]
    for number in range(calls):
        messages = [{"role": "user", "content": f"Count to {number}."}]
        stream = True
        if number < LARGE_CALLS * calls:
            messages, stream = [{"role": "user", "content": "word " * (LARGE_CHARS // 5)}], False
        elif number < (LARGE_CALLS + LONG_CALLS) * calls:
            messages = turns * (LONG_MESSAGES // 2) + messages
        body = {"model": "m", "messages": messages, "stream": stream, "max_tokens": 16}
        yield "POST", f"{server.url}/trial-{number}/v1/chat/completions", body, {}


@asynccontextmanager
async def swarm(folder: Path) -> AsyncIterator[Server]:
    """A swarm server that rolls, whose trainer has no model."""
    trainer = (sys.executable, "-m", "tests.agent_loop.extras.swarm.scripted_trainer")
    files = (str(write_checkpoint(folder / "model")), str(folder / "batches.jsonl"))
    serve = ("tests.agent_loop.extras.swarm.serve_process", "127.0.0.1:0", str(folder / "state"))
    log = folder / "server.log"
    async with (
        running_server(*serve, *trainer, *files, log=log, AGENTIC_SWARM_TOKEN=TOKEN) as server,
        AsyncSwarmClient(server.url, TOKEN) as client,
    ):
        await client.auto_start("model: {path: m}")
        yield server


def swarm_calls(server: Server, calls: int) -> Iterator[tuple[str, str, Body, Mapping[str, str]]]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for number in range(calls):
        if number % 4 == 0:
            yield "GET", f"{server.url}/v1/status?since=0&wait_s=5", {}, headers
        elif number % 4 == 1:
            yield "GET", f"{server.url}/v1/tasks?limit=1000", {}, headers
        else:
            claim = {"client_id": f"c{number % 64}", "task_id": f"t{number}", "wait_s": 5}
            yield "POST", f"{server.url}/v1/episodes", claim, headers


async def load(
    requests: Iterable[tuple[str, str, Body, Mapping[str, str]]],
) -> Counter[int]:
    """Sends all requests at once, each on a connection of its own, and returns the number of
    answers by status. An answer is read to its end."""
    packed = [(m, url, json.dumps(body).encode(), headers) for m, url, body, headers in requests]
    statuses: Counter[int] = Counter()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def call(method: str, url: str, data: bytes, headers: Mapping[str, str]) -> None:
            sent = {"Content-Type": "application/json", **headers}
            async with http.request(method, url, data=BytesIO(data), headers=sent) as response:
                await response.read()
                statuses[response.status] += 1

        async with asyncio.TaskGroup() as group:
            for each in packed:
                group.create_task(call(*each))
    return statuses


SERVERS = {"proxy": (proxy, proxy_calls), "swarm": (swarm, swarm_calls)}


async def full_load(folder: Path, name: str, calls: int) -> tuple[Answers, Counter[int]]:
    """The answers of `/health` of the server `name`, and those of its calls, `calls` at a time."""
    raise_limit()
    start, requests = SERVERS[name]
    statuses: Counter[int] = Counter()
    async with start(folder) as server, asked(server) as found:
        while not statuses or len(found) < ASKED:
            statuses += await load(requests(server, calls))
    return found[-1], statuses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.full_load", description=__doc__)
    parser.add_argument("--server", choices=SERVERS, default="proxy")
    parser.add_argument("--calls", type=int, default=4096)
    parser.add_argument("--ask", nargs=3, metavar=("HOST", "PORT", "PID"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        host, port, pid = given.ask
        ask(host, int(port), int(pid))
        return 0
    with tempfile.TemporaryDirectory(prefix="full-load-") as folder:
        answers, statuses = asyncio.run(full_load(Path(folder), given.server, given.calls))
    print(f"{given.server}, {dict(statuses)}: {answers}, the bound is {BOUND_S} s")
    return int(answers.worst_s > BOUND_S)


if __name__ == "__main__":
    sys.exit(main())
