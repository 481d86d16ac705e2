"""10,000 agents at once on two proxies, one PostgreSQL and two engines.

All processes run on this machine. The agents are coroutines in `--processes` processes
(`part.py`), each a trial of the real `RemoteAgentLoop` that makes streaming calls over HTTP. The
proxies are real (`agentic-proxy serve`), the engines are fake ones (`benchmarks/proxy`). No call
is made before all sessions are open. Afterwards every session is read from PostgreSQL and compared
with what its agent got. With `--kill`, one proxy is killed with SIGKILL when half of the calls have
begun, and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import orjson

from benchmarks.agents.part import KEY
from benchmarks.proxy.targets import process_cpu_s, write_checkpoint
from proxy.machine.port import free_port
from proxy.records import TurnStatus
from proxy.store import open_store
from tests.postgres_server import PostgresServer, binaries, postgres_process

SAMPLE_S = 1.0
IN_FLIGHT = re.compile(r"^agentic_proxy_in_flight_calls (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class Program:
    """A process that is measured, also over a restart."""

    name: str
    argv: Sequence[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0
    peak_bytes: int = 0
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *self.argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": KEY} | self.environment,
                limit=2**26,
            )

    async def line(self) -> str:
        """The next line of its output."""
        assert self.process is not None
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: {self.log.read_text(encoding='utf-8')[-3000:]}")
        return line.decode().strip()

    def tell(self, text: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    async def end(self, *, kill: bool = False) -> None:
        if self.process is not None and self.process.returncode is None:
            if kill:
                self.measure()
            (self.process.kill if kill else self.process.terminate)()
            await self.process.wait()

    def forget(self) -> None:
        """Leaves out the processor time of its start."""
        assert self.process is not None
        self.cpu_s = -process_cpu_s(self.process.pid)

    def measure(self) -> None:
        """Adds what this process has used; to be called once, before it is ended."""
        assert self.process is not None
        pid = self.process.pid
        self.cpu_s += process_cpu_s(pid)
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        self.peak_bytes = max(self.peak_bytes, _status_bytes(status, "VmHWM"))


@dataclass(slots=True)
class Fleet:
    """Example: async with fleet(folder, given) as running: running.proxies[0].url"""

    proxies: list[Program]
    urls: list[str]
    engines: list[Program]
    postgres: PostgresServer
    most_in_flight: int = 0

    async def watch(self) -> None:
        """Adds up what the proxies' metrics report, until it is cancelled."""
        headers = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            while True:
                pages = [await _page(http, f"{url}/metrics") for url in self.urls]
                counts = [float(found[1]) for page in pages if (found := IN_FLIGHT.search(page))]
                self.most_in_flight = max(self.most_in_flight, int(sum(counts)))
                await asyncio.sleep(SAMPLE_S)

    async def kill_one(self) -> None:
        """Kills the first proxy with SIGKILL, and starts it again."""
        await self.proxies[0].end(kill=True)
        await self.proxies[0].start()
        await self.proxies[0].line()


@asynccontextmanager
async def fleet(folder: Path, given: argparse.Namespace) -> AsyncIterator[Fleet]:
    programs = binaries()
    if programs is None:
        raise SystemExit("PostgreSQL is not installed: apt-get install postgresql")
    write_checkpoint(folder / "model")
    async with AsyncExitStack() as stack:
        postgres = stack.enter_context(postgres_process(programs))
        arguments = ("--tokens", str(given.tokens), "--tokens-per-s")
        rate = str(given.tokens / given.answer_s)
        engines = [
            Program(f"engine {n}", ("benchmarks.proxy.fake_vllm", *arguments, rate), folder / "log")
            for n in (1, 2)
        ]
        urls = []
        for engine in engines:
            stack.push_async_callback(engine.end)
            await engine.start()
            urls.append(await engine.line())
        proxies, proxy_urls = [], []
        for number in (1, 2):
            port = free_port("127.0.0.1")
            settings = {
                "AGENTIC_PROXY_MODEL": str(folder / "model"),
                "AGENTIC_PROXY_STORE": postgres.url,
                "AGENTIC_PROXY_PORT": str(port),
                "AGENTIC_PROXY_ENGINES": json.dumps([{"url": url} for url in urls]),
                "AGENTIC_PROXY_LIMITS__IN_FLIGHT_CALLS": str(given.agents),
            }
            argv = ("proxy", "serve")
            proxy = Program(f"proxy {number}", argv, folder / f"proxy-{number}.log", settings)
            stack.push_async_callback(proxy.end)
            await proxy.start()
            await proxy.line()
            proxies.append(proxy)
            proxy_urls.append(f"http://127.0.0.1:{port}")
        yield Fleet(proxies, proxy_urls, engines, postgres)


async def run(folder: Path, given: argparse.Namespace) -> bool:
    """Whether the record is what the agents got."""
    async with fleet(folder, given) as running, AsyncExitStack() as stack:
        parts = []
        for number in range(given.processes):
            share = given.agents // given.processes
            arguments = {
                "--proxy": running.urls[number % 2],
                "--agents": str(share + (number < given.agents % given.processes)),
                "--calls": str(given.calls),
                "--tokens": str(given.tokens),
                "--folder": str(folder / f"part-{number}"),
                "--log": str(folder / f"part-{number}.jsonl"),
                "--result": str(folder / f"part-{number}.json"),
            }
            argv = (
                "benchmarks.agents.part",
                *(word for pair in arguments.items() for word in pair),
            )
            parts.append(Program(f"agents {number + 1}", argv, folder / f"part-{number}.log"))
            stack.push_async_callback(parts[-1].end)
        for program in (*running.proxies, *running.engines):
            program.forget()
        watching = asyncio.create_task(running.watch())
        began = time.monotonic()
        await asyncio.gather(*(part.start() for part in parts))
        await asyncio.gather(*(part.line() for part in parts))
        opened = time.monotonic()
        for part in parts:
            part.tell("go")
        if given.kill:
            await _begun(running.postgres.url, given.agents * given.calls // 2)
            await running.kill_one()
        await asyncio.gather(*(part.line() for part in parts))
        done = [json.loads(path.read_bytes()) for path in sorted(folder.glob("part-*.json"))]
        ended = time.monotonic()
        watching.cancel()
        for program in (*running.proxies, *running.engines):
            program.measure()
        checked = await _check(running.postgres.url, sorted(folder.glob("part-*.jsonl")))
        _report(given, running, done, checked, opened - began, ended - opened)
    return checked.right


async def _begun(url: str, calls: int) -> None:
    """Returns when this number of calls is recorded as begun."""
    connection = await asyncpg.connect(url)
    try:
        query = "SELECT count(*) FROM turns"
        while await connection.fetchval(query) < calls:  # noqa: ASYNC110 (other processes write)
            await asyncio.sleep(SAMPLE_S)
    finally:
        await connection.close()


@dataclass(slots=True)
class Checked:
    """What the store holds, compared with what the agents got."""

    answers: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    """Answers that an agent got and that are not recorded as DONE, or in another order."""
    doubled: int = 0
    """DONE turns of calls that are also another DONE turn, or that the agent did not get."""

    @property
    def right(self) -> bool:
        return not (self.lost or self.doubled or self.statuses[TurnStatus.OPEN.value])


async def _check(url: str, logs: Sequence[Path]) -> Checked:
    checked = Checked()
    store = await open_store(url, create=False)
    try:
        for log in logs:
            for line in log.read_bytes().splitlines():
                trial, got = orjson.loads(line)
                turns = await store.get_turns(trial)
                checked.statuses.update(turn.status.value for turn in turns)
                # The turn of a retry has the key of the first attempt, and adds no messages to it.
                marks = {turn.request_key: _mark(turn.request) for turn in reversed(turns)}
                done = [marks[turn.request_key] for turn in turns if turn.status is TurnStatus.DONE]
                checked.answers += len(got)
                checked.lost += (Counter(got) - Counter(done)).total()
                checked.doubled += (Counter(done) - Counter(got)).total()
                checked.lost += sorted(done) == sorted(got) and done != got
    finally:
        await store.close()
    return checked


def _mark(request: bytes) -> str:
    """The mark of the call that added these messages."""
    found = re.findall(rb"[\w-]+ call \d+", request)
    return found[-1].decode() if found else ""


def _report(
    given: argparse.Namespace,
    running: Fleet,
    done: Sequence[dict[str, Any]],
    checked: Checked,
    open_s: float,
    work_s: float,
) -> None:
    calls, trials = given.agents * given.calls, given.agents
    latencies = sorted(second for part in done for second in part["latencies_s"])
    failed = [part["error"] for part in done if part["failed"]]
    repeated = sum((Counter(part["repeated"]) for part in done), Counter())
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{trials} agents of {given.calls} calls, {given.tokens} tokens in {given.answer_s} s")
    print(f"load of the machine at the end: {load} on {os.cpu_count()} cores")
    print(f"{trials} sessions open after {open_s:.0f} s ({trials / open_s:.0f}/s)")
    print(f"{calls} calls and {trials} ends in {work_s:.0f} s: {calls / work_s:.0f} calls/s")
    print(f"most calls in flight: {running.most_in_flight}")
    if latencies:
        half, most = latencies[len(latencies) // 2], latencies[len(latencies) * 99 // 100]
        print(f"call: p50 {half:.1f} s, p99 {most:.1f} s")
    print(f"repeated calls: {dict(repeated) or 'none'}")
    print(f"rollouts: {sum(part['trials'] for part in done)}, failed {len(failed)} {failed[:1]}")
    print(f"tokens to train: {sum(part['trained_tokens'] for part in done)}")
    print(f"turns in the store: {dict(checked.statuses)}")
    print(
        f"answers that the agents got: {checked.answers}; lost {checked.lost}, doubled "
        f"{checked.doubled}, open {checked.statuses[TurnStatus.OPEN.value]}"
    )
    print("| process | processor, ms per trial | peak memory, MiB |\n|---|---|---|")
    for program in (*running.proxies, *running.engines):
        _row(program.name, program.cpu_s, trials, program.peak_bytes)
    _row(
        "agents and loops, together",
        sum(p["cpu_s"] for p in done),
        trials,
        sum(p["peak_bytes"] for p in done),
    )
    assert running.postgres.process is not None
    _row("PostgreSQL", _family_cpu_s(running.postgres.process.pid), trials, 0)


def _row(name: str, cpu_s: float, trials: int, peak_bytes: int) -> None:
    memory = f"{peak_bytes / 2**20:.0f}" if peak_bytes else "not measured"
    print(f"| {name} | {cpu_s / trials * 1e3:.2f} | {memory} |")


def _family_cpu_s(pid: int) -> float:
    """Processor time of the process, of its children, and of those that it has waited for."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    ticks = os.sysconf("SC_CLK_TCK")
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    waited_s = (int(fields[13]) + int(fields[14])) / ticks
    return process_cpu_s(pid) + waited_s + sum(process_cpu_s(int(child)) for child in children)


async def _page(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(url) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return ""  # killed, or not up again


def _status_bytes(status: str, name: str) -> int:
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--agents", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--answer-s", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kill", action="store_true", help="kill one proxy in the middle")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * given.agents:
        raise SystemExit(f"open files: the limit is {hard}, {2 * given.agents} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
        return int(not asyncio.run(run(Path(folder), given)))


if __name__ == "__main__":
    sys.exit(main())
