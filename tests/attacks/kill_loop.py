"""Agents make calls while proxy, workers, engine and PostgreSQL are killed repeatedly.

    python -m tests.attacks.kill_loop --kills 1000 --seed 7

SIGINT (Ctrl-C) ends the killing early; the agents finish their turns, and the record is examined.
What must hold: every answer that an agent got is in the record, once, in its order; no turn stays
open; every session's turns form one path whose prompts are what the engine was given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import aiohttp
import orjson
import yaml

from proxy.client import ProxyClient, ProxyClientError, SessionHandle
from proxy.conversation.messages import load_answer
from proxy.records import Turn, TurnStatus
from tests.attacks.engine_process import POISON, POISONED
from tests.attacks.server import family, line_of
from tests.attacks.victim import ADMIN_KEY
from tests.postgres_server import PostgresServer, binaries, postgres_process
from tests.proxy.checkpoint import write_checkpoint

TARGETS = ("proxy", "worker", "engine", "postgres", "poison")
"""`poison`: a request that ends each engine that samples it, until it is refused."""
AGENTS = 4
TURNS_PER_KILL = 10
"""Answers of all agents together between two kills."""
TURNS_PER_SESSION = 100
TOKEN_DELAY_S = 0.001
PROGRESS_KILLS = 25
WORKERS_END_S = 300.0
"""The workers of a killed proxy end within this time: their calls in flight get
`limits.shutdown_s`, and the machine may be busy."""


@dataclass(slots=True)
class Program:
    """A process on a fixed port that is killed and started again."""

    argv: Sequence[str]
    log: Path
    restarted_after: int | None = None
    """The exit code after which `watch` starts it again, whenever it ends with it."""
    up: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *self.argv),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
            )
        if not await line_of(self.process):
            raise RuntimeError(f"{self.argv[0]} did not start: {self.log.read_text()[-2000:]}")
        self.up.set()

    async def watch(self) -> NoReturn:
        """Raises RuntimeError when it has ended without being killed by `kill`, and not with
        `restarted_after`."""
        while True:
            await self.up.wait()
            assert self.process is not None
            code = await self.process.wait()
            if not self.up.is_set():
                continue  # by `kill`
            if code != self.restarted_after:
                log = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.argv[0]} ended by itself with code {code}: {log}")
            self.up.clear()
            await self.start()

    async def kill(self) -> None:
        """Its worker processes end by themselves, and then the port is free."""
        assert self.process is not None
        self.up.clear()
        workers = family(self.process.pid)[1:]
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        async with asyncio.timeout(WORKERS_END_S):
            await asyncio.gather(*map(_end_of, workers))

    def kill_child(self, rng: random.Random) -> None:
        """One of its worker processes; it starts another itself."""
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        with suppress(ProcessLookupError, IndexError):
            os.kill(int(rng.choice(children)), signal.SIGKILL)


async def _end_of(pid: int) -> None:
    """Returns when a process has ended that is not a child of this one."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


class Agent:
    """One conversation after the other, each in a session of its own. Every call is repeated until
    it is answered."""

    def __init__(
        self,
        sessions: Sequence[SessionHandle],
        proxy: Program,
        answered: asyncio.Queue[int],
        story: list[tuple[float, str]],
    ):
        self.sessions, self.proxy, self.answered, self.story = sessions, proxy, answered, story
        self.answers: list[list[str]] = [[] for _ in sessions]
        self.refusals: Counter[int] = Counter()
        self.cuts = 0
        """Streams that ended without their terminal event."""

    async def run(self, rng: random.Random, over: asyncio.Event) -> None:
        for session, answers in zip(self.sessions, self.answers, strict=True):
            messages: list[dict[str, str]] = [{"role": "user", "content": "Begin."}]
            while len(answers) < TURNS_PER_SESSION and not over.is_set():
                answer = await self._answer(session, messages, stream=rng.random() < 0.5)
                answers.append(answer)
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": f"Go on, {len(answers)}."},
                ]
                self.answered.put_nowait(len(answers))

    async def _answer(
        self, session: SessionHandle, messages: list[dict[str, str]], *, stream: bool
    ) -> str:
        while True:
            await self.proxy.up.wait()
            try:
                answer = await self._call(session, messages, stream=stream)
                if answer is not None:
                    return answer
            except (aiohttp.ClientError, ConnectionError) as error:
                self.story.append((time.time(), f"{session.trial_id[:4]} got {error!r:.60}"))
            await asyncio.sleep(0.01)  # as a client's back-off: what was killed will be up again

    async def _call(
        self, session: SessionHandle, messages: list[dict[str, str]], *, stream: bool
    ) -> str | None:
        """None: refused with a status after which clients try again."""
        body = {"model": "m", "messages": messages, "stream": stream}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=headers) as response,
        ):
            data = await response.read()
        if response.status in (429, 502, 503, 504):
            self.refusals[response.status] += 1
            what = f"{session.trial_id[:4]} got {response.status} {data[:120]!r}"
            self.story.append((time.time(), what))
            return None
        if response.status == 400 and b'"code":"engines_lost"' in data:
            # It was about to begin alone in each of the last kills: nothing tells it from a request
            # that kills engines. An agent goes on with another request.
            self.refusals[400] += 1
            messages[-1]["content"] += " Again."
            return None
        assert response.status == 200, (response.status, data)
        if not stream:
            return str(orjson.loads(data)["choices"][0]["message"]["content"])
        *events, last, _ = data.split(b"\n\n")
        if last != b"data: [DONE]":
            self.cuts += 1
            self.story.append((time.time(), f"{session.trial_id[:4]} got a cut stream"))
            return None  # cut: the terminal event is missing
        chunks = [orjson.loads(e.removeprefix(b"data: ")) for e in events if e.startswith(b"data:")]
        return "".join(
            c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]
        )


@dataclass(slots=True)
class Scene:
    """Everything that can be killed."""

    proxy: Program
    engine: Program
    postgres: PostgresServer | None
    control: ProxyClient
    rng: random.Random

    async def kill(self, target: str) -> None:
        if target == "proxy":
            await self.proxy.kill()
            await self.proxy.start()
        elif target == "worker":
            self.proxy.kill_child(self.rng)
        elif target == "engine":
            await self.engine.up.wait()  # what poison ended is being started again
            await self.engine.kill()
            await self.engine.start()
        elif target == "poison":
            await self._poison()
        elif self.postgres is not None:
            await asyncio.to_thread(self.postgres.kill)
            await asyncio.to_thread(self.postgres.start)

    async def _poison(self) -> None:
        """Returns when the request is refused. An engine that it ended is started again by its
        `watch`, at whatever moment its end becomes known.

        Raises AssertionError if the request is answered, or refused for another reason.
        """
        text = f"{POISON} {self.rng.random()}"
        while True:  # as any client's: of two workers, both may have been killed just before
            try:
                await _refused(await self.control.create_session(), text)
            except (ProxyClientError, aiohttp.ClientError):
                await asyncio.sleep(0.01)
            else:
                return


async def _refused(session: SessionHandle, text: str) -> None:
    """Returns when the request is refused for good, as one that has taken down its engines."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    while True:
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=body, headers=headers) as response,
        ):
            data = await response.read()
        if response.status not in (429, 502, 503, 504):
            break
    assert response.status == 400, (response.status, data)
    assert b'"code":"engines_lost"' in data


@dataclass(frozen=True, slots=True)
class Report:
    kills: Counter[str]
    answers: int
    lost: list[str]
    doubled: list[str]
    open: list[str]
    failed_calls: int
    """Calls that an agent had to repeat: refused, or cut in mid-stream."""
    convicted: int
    """Calls that were refused because their engines were killed each time they began: an agent
    goes on with another request."""

    @property
    def broken(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.open]

    def summary(self) -> str:
        kills = ", ".join(f"{n} of {target}" for target, n in self.kills.items())
        return (
            f"{sum(self.kills.values())} kills ({kills}), {self.answers} answers: "
            f"{len(self.lost)} lost, {len(self.doubled)} doubled, {len(self.open)} open, "
            f"{self.convicted} taken for requests that kill engines"
        )


@asynccontextmanager
async def scene(folder: Path, targets: Sequence[str], rng: random.Random) -> AsyncIterator[Scene]:
    """SQLite, or PostgreSQL where it is a target; two workers where they are."""
    checkpoint = write_checkpoint(folder / "model")
    async with AsyncExitStack() as stack:
        resources = stack.enter_context(ExitStack())
        postgres = None
        if "postgres" in targets:
            programs = binaries()
            if programs is None:
                raise RuntimeError("PostgreSQL is not installed: apt-get install postgresql")
            postgres = resources.enter_context(postgres_process(programs))
        engine_port, port = _free_port(), _free_port()
        engine = Program(
            ("tests.attacks.engine_process", str(checkpoint), str(engine_port), str(TOKEN_DELAY_S)),
            folder / "engine.log",
            restarted_after=POISONED,
        )
        config = folder / "proxy.yaml"
        settings = {
            "model": str(checkpoint),
            "port": port,
            "engines": [{"url": f"http://127.0.0.1:{engine_port}"}],
            "store": postgres.url if postgres else f"sqlite:///{folder}/sessions.db",
            "workers": 2 if "worker" in targets else 1,
        }
        config.write_text(yaml.safe_dump(settings))
        proxy = Program(("proxy", "serve", "--config", str(config)), folder / "proxy.log")
        for program in (engine, proxy):
            stack.push_async_callback(program.kill)
            await program.start()
        control = ProxyClient(f"http://127.0.0.1:{port}", ADMIN_KEY)
        yield Scene(proxy, engine, postgres, await stack.enter_async_context(control), rng)


async def kill_loop(
    folder: Path,
    targets: Sequence[str],
    kills: int,
    seed: int,
    stop: asyncio.Event | None = None,
    *,
    least: int = 1,
) -> Report:
    """Raises AssertionError where an agent got an answer that is not a retryable refusal; every
    error has a note with the seed and what happened last.

    `stop` ends the killing early. `least`: of the answers between two kills; with more
    than 1, those from before a kill do not count after it.
    """
    story: list[tuple[float, str]] = []
    """When something was killed, or a call had to be repeated, in Unix seconds."""
    try:
        return await _kill(folder, targets, kills, random.Random(seed), stop, story, least)
    except BaseException as error:
        now = time.time()
        last = (f"{now - at:.2f} s before: {what}" for at, what in story[-30:])
        error.add_note("\n".join([f"seed {seed}, targets {' '.join(targets)}", *last]))
        raise


async def _kill(
    folder: Path,
    targets: Sequence[str],
    kills: int,
    rng: random.Random,
    stop: asyncio.Event | None,
    story: list[tuple[float, str]],
    least: int,
) -> Report:
    stop = stop or asyncio.Event()
    # Twice: also for the answers that come while something is killed and started.
    sessions = 2 * TURNS_PER_KILL * (kills + 1) // AGENTS // TURNS_PER_SESSION + 1
    killed: Counter[str] = Counter()
    async with scene(folder, targets, rng) as place:
        answered: asyncio.Queue[int] = asyncio.Queue()
        agents = [
            Agent(
                [await place.control.create_session() for _ in range(sessions)],
                place.proxy,
                answered,
                story,
            )
            for _ in range(AGENTS)
        ]
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(p.watch()) for p in (place.proxy, place.engine)]
            working = [
                group.create_task(agent.run(random.Random(rng.random()), over)) for agent in agents
            ]
            while killed.total() < kills and not stop.is_set():
                while least > 1 and not answered.empty():  # from before the last kill
                    answered.get_nowait()
                for _ in range(rng.randint(least, TURNS_PER_KILL)):
                    await answered.get()
                await asyncio.sleep(rng.random() * 0.05)  # any moment of a call, not just its end
                target = rng.choice(targets)
                killed[target] += 1
                story.append((time.time(), f"kills {target}"))
                await place.kill(target)
                story.append((time.time(), f"{target} is up"))
                if killed.total() % PROGRESS_KILLS == 0:
                    sys.stderr.write(f"{killed.total()} kills, {_answers(agents)} answers\n")
            over.set()
            await asyncio.wait(working)
            for watch in watches:
                watch.cancel()
        return await _examine(place.control, agents, killed, story)


async def _examine(
    control: ProxyClient,
    agents: list[Agent],
    killed: Counter[str],
    story: Sequence[tuple[float, str]],
) -> Report:
    lost: list[str] = []
    doubled: list[str] = []
    still_open: list[str] = []
    for agent in agents:
        for session, answers in zip(agent.sessions, agent.answers, strict=True):
            trial = session.trial_id
            _, turns = await control.get_turns(trial)
            done = [load_answer(t.answer).text for t in turns if t.status is TurnStatus.DONE]
            missing = Counter(answers) - Counter(done)
            lost += [f"{trial}: {text} {_told(turns, text, story)}" for text in missing.elements()]
            extra = Counter(done) - Counter(answers)
            doubled += [f"{trial}: {text} {_told(turns, text, story)}" for text in extra.elements()]
            if not lost and not doubled and done != answers:
                lost.append(f"{trial}: the order of answers is another one")
            still_open += [f"{trial}#{t.index}" for t in turns if t.status is TurnStatus.OPEN]
    return Report(
        killed,
        answers=_answers(agents),
        lost=lost,
        doubled=doubled,
        open=still_open,
        failed_calls=sum(agent.refusals.total() + agent.cuts for agent in agents),
        convicted=sum(agent.refusals[400] for agent in agents),
    )


def _told(turns: Sequence[Turn], text: str, story: Sequence[tuple[float, str]]) -> str:
    """The turns with this answer, and what was killed and refused around them."""
    same = [t for t in turns if t.answer and load_answer(t.answer).text == text]
    if not same:
        return f"in none of {len(turns)} turns"
    first, last = same[0].started_at, same[-1].started_at
    told = [(t.started_at, f"#{t.index} {t.status.value} after #{t.parent}") for t in same]
    told += [(at, what) for at, what in story if first - 5 < at < last + 5]
    return ", ".join(f"{at - first:.2f} s {what}" for at, what in sorted(told))


def _answers(agents: Sequence[Agent]) -> int:
    return sum(len(answers) for agent in agents for answers in agent.answers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _until_interrupted(folder: Path, given: argparse.Namespace) -> Report:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    return await kill_loop(folder, given.targets, given.kills, given.seed, stop)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.kill_loop", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    sys.stderr.write(f"seed {given.seed}\n")
    with tempfile.TemporaryDirectory(prefix="kill-loop-") as folder:
        report = asyncio.run(_until_interrupted(Path(folder), given))
    sys.stdout.write(f"seed {given.seed}: {report.summary()}\n")
    for line in report.broken[:20]:
        sys.stdout.write(f"BROKEN {line}\n")
    return int(bool(report.broken))


if __name__ == "__main__":
    sys.exit(main())
