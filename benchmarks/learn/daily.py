"""Simulated users with a recorder, a vLLM and a learner, as they would run for a person.

A user gives tasks in Git repositories, and likes one way of doing them, which the tasks do not say.
After a session the user rates it, or keeps or reverts its commit. A recorder, a vLLM and a learner
run as they would for a person; the learner looks at the record after each session.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.learn import world
from benchmarks.learn.agent import AGENTS, Agent, Work, command_of
from proxy.client import ProxyClient, SessionHandle
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import TARGET
from proxy.machine.port import free_port
from proxy.records import SessionKind
from trainer.extras.learn.command import learning
from trainer.extras.learn.config import LearnConfig, read_config
from trainer.extras.learn.learner import DailyLearner
from trainer.policy.adapter import adapter_arguments

AT_ONCE = 8
"""Sessions of an evaluation at once, which a vLLM samples in one batch."""
ADMIN_KEY = "admin-key-of-the-benchmark"


@dataclass
class User:
    """A simulated user. Example: User("conventional", random.Random(0), says=0.5, wrong=0.05)"""

    preference: str
    rng: random.Random
    says: float = 0.5
    """Share of the sessions that are rated; of the others, the commit is kept or reverted. One
    without a commit is rated."""
    wrong: float = 0.0
    """Share of the sessions of which the user says the contrary."""

    async def react(self, control: ProxyClient, session: str, folder: Path, *, liked: bool) -> None:
        says_liked = liked != (self.rng.random() < self.wrong)
        made = world.commits(folder) > 1
        if self.rng.random() < self.says or not made:
            await control.curate(session, value=float(says_liked))
        elif not says_liked:
            world.revert(folder)


@dataclass
class Show:
    """One user, one recorder, one learner."""

    control: ProxyClient
    http: aiohttp.ClientSession
    learner: DailyLearner
    folder: Path
    user: User
    rng: random.Random
    agent: Agent
    outcomes: list[tuple[str, bool]] = field(default_factory=list)
    """Of each session: the policy that served it, and whether it was as the user likes."""
    calls: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What took the time: sessions, the learner's looks, its updates, evaluations."""

    async def session(self, number: int) -> bool:
        """One session of daily work, and what the learner then does."""
        started = time.monotonic()
        folder = self.folder / "work" / f"{number:04d}"
        world.new_repository(folder)
        metadata = {"folder": str(folder)}
        made = await self.control.create_session(f"day-{number:04d}", metadata=metadata)
        job = world.new_job(self.rng)
        liked = await self.work(made, folder, job, self.agent.works)
        await self.control.complete(made.trial_id)
        await self.user.react(self.control, made.trial_id, folder, liked=liked)
        session, turns = await self.control.get_turns(made.trial_id)
        served = {turn.policy for turn in turns}
        assert served == {session.policy_of("")}, f"{made.trial_id} was served by {served}"
        self.outcomes.append((session.policy_of(""), liked))
        ended = time.monotonic()
        updates = len(self.learner.history.updates)
        await self.learner.tick()
        updated = len(self.learner.history.updates) > updates
        self.seconds["sessions"] += ended - started
        self.seconds["updates" if updated else "looks"] += time.monotonic() - ended
        return liked

    async def order(self, order: str) -> None:
        """What a person orders by `agentic-proxy policy`."""
        async with LearnClient(self.control.base_url, ADMIN_KEY) as admin:
            await admin.order(self.learner.policy, order)

    async def work(self, made: SessionHandle, folder: Path, job: world.Job, by: Work) -> bool:
        """Whether the agent's session is as the user likes."""
        calls = await by(self.http, made, job, folder)
        self.calls += calls  # read after the wait, in which other sessions count theirs
        _, turns = await self.control.get_turns(made.trial_id)
        return world.is_preferred(folder, job, self.user.preference, commands_of(turns))

    async def evaluate(self, adapter: int, count: int) -> float:
        """The share of fresh sessions, which nothing learns from, that are as the user likes."""
        started, rng = time.monotonic(), random.Random(1_000_003)
        policies = {"": f"{self.learner.policy}-{adapter}"} if adapter else {}
        at_once = asyncio.Semaphore(AT_ONCE)

        async def fresh(job: world.Job) -> bool:
            async with at_once:
                folder = self.folder / "eval" / f"{time.monotonic_ns()}"
                world.new_repository(folder)
                made = await self.control.create_session(
                    kind=SessionKind.EVAL, policies=policies, sampling={"temperature": 1.0}
                )
                liked = await self.work(made, folder, job, self.agent.evaluates)
                await self.control.complete(made.trial_id)
                return liked

        liked = await asyncio.gather(*(fresh(world.new_job(rng)) for _ in range(count)))
        self.seconds["evaluations"] += time.monotonic() - started
        return sum(liked) / count


def commands_of(turns: Any) -> list[str]:
    """The commands that a session ran."""
    return [
        command_of(call["arguments"])
        for turn in turns
        for call in json.loads(turn.answer or b"{}").get("tool_calls", ())
    ]


@asynccontextmanager
async def engine(folder: Path, model: Path, seed: int = 0) -> AsyncIterator[str]:
    """A vLLM that serves adapters of the model."""
    args = tuple(adapter_arguments(model))
    settings = VllmConfig(max_context_tokens=2048, lora_rank=8, lora_slots=12, args=args)
    log = folder / "vllm.log"
    server = VllmServer(settings, model, log=log, dtype="float32", seed=seed)
    await server.start()
    try:
        yield server.url
    finally:
        await server.stop()


@asynccontextmanager
async def recorder(
    folder: Path, engine_url: str, section: dict[str, Any], model: Path
) -> AsyncIterator[str]:
    """`agentic-proxy serve`, with the extra of learners."""
    port = free_port("127.0.0.1")
    config = folder / "recorder.yaml"
    extra = {"target": TARGET, "settings": {"recorders": [section]}}
    config.write_text(yaml.safe_dump({"extras": [extra]}), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "proxy", "serve", "--config", str(config)),
        *("--model", str(model), "--engine", engine_url, "--port", str(port)),
        *("--store", f"sqlite:///{folder}/sessions.db"),
    ]
    with (folder / "recorder.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
        )
        assert process.stdout is not None
        try:
            line = (await process.stdout.readline()).decode()
            assert "recording proxy" in line, (folder / "recorder.log").read_text(encoding="utf-8")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


def section_of(folder: Path) -> dict[str, Any]:
    """The section `recorder`. Several learners share an engine, by the names of their folders."""
    return {"policy": folder.name, "folder": str(folder / "learn"), "folders": [str(folder)]}


def learn_yaml(
    folder: Path, url: str, engine_url: str, seed: int, model: Path, **more: Any
) -> LearnConfig:
    """Writes and reads the learner's configuration."""
    values: dict[str, Any] = {
        "recorder": section_of(folder),
        "url": url,
        "engines": [engine_url],
        "evidence": ["rating", {"name": "kept", "after_s": 0}],
        "model": {"path": str(model), "lora": {"rank": 8, "alpha": 16}},
        "optimizer": {"lr": 3.0e-3, "betas": [0.9, 0.95], "schedule": "linear"},
        "update": {"sessions": 8, "epochs": 36, "held_out": 0.1, "replay": 1.0}
        | more.pop("update", {}),
        "canary": {"alpha": 0.1},
        "device": "cpu",
        "seed": seed,
    }
    path = folder / "learn.yaml"
    path.write_text(yaml.safe_dump(values | more), encoding="utf-8")
    return read_config(path)


@asynccontextmanager
async def show(
    folder: Path, engine_url: str, user: User, seed: int, agent: str = "like-mini", **more: Any
) -> AsyncIterator[Show]:
    """A user with a recorder and a learner."""
    used = AGENTS[agent]
    async with recorder(folder, engine_url, section_of(folder), used.model) as url:
        config = learn_yaml(folder, url, engine_url, seed, used.model, **more)
        async with (
            learning(config) as learner,
            ProxyClient(url, ADMIN_KEY) as control,
            aiohttp.ClientSession() as http,
        ):
            yield Show(control, http, learner, folder, user, random.Random(seed), used)
