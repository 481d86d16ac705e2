"""How other calls fare while one request a minute kills the real vLLMs that sample it.

    python -m tests.attacks.real_poison --minutes 10 --every 60

Two vLLMs, each with a plug-in that ends its engine as a fault of a kernel does: an error in the
model's pass over a request whose prompt begins with POISON. Each is started again when it has
ended. What must hold: every poisonous request is refused as such after at most ENGINES_LOST_LATE
engines, and every other call has its whole answer. How long these took is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.errors import EngineError, RequestError
from proxy.records import FinishReason
from proxy.routing.blame import ENGINES_LOST_LATE
from proxy.routing.generation import Generation
from proxy.routing.router import Router

MODEL = Path("examples/quickstart/model")
POISON = (7, 8, 9, 7, 8, 9)
ANSWER_TOKENS, PROMPT_TOKENS = 64, 200
VOCAB_SIZE = 256
"""Ids of prompts are below it, so that any model has them."""
AGENTS, PAUSE_S, PROGRESS_S = 8, 0.5, 30.0
PATIENCE_S = 600.0
PLUGIN = "poisonable"


def register() -> None:
    """The plug-in, which vLLM calls in each process of an engine."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    honest = GPUModelRunner.execute_model

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            if tuple((new.prompt_token_ids or ())[: len(POISON)]) == POISON:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return honest(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_model


def write_plugin(folder: Path) -> dict[str, str]:
    """What an environment needs so that vLLM finds `register` as a plug-in."""
    entry = folder / f"{PLUGIN}-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    points = f"[vllm.general_plugins]\n{PLUGIN} = tests.attacks.real_poison:register\n"
    (entry / "entry_points.txt").write_text(points)
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(Path.cwd())))}


@dataclass
class Report:
    answered: int = 0
    deaths: Counter[int] = field(default_factory=Counter)
    """How many poisonous requests ended how many engines."""
    waits_s: list[float] = field(default_factory=list)
    """How long each call took that was not poisonous."""
    causes: Counter[str] = field(default_factory=Counter)
    """What our reading of the engines' logs says why they ended."""
    faults: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        half, last = np.percentile(self.waits_s or [0.0], [50, 99])
        return (
            f"{self.answered} answers, {half:.1f} s in the median, {last:.1f} s at 99 %, at most"
            f" {max(self.waits_s, default=0.0):.1f} s; poisonous requests by engines that they"
            f" ended: {dict(self.deaths)}; causes: {dict(self.causes)}; faults: {dict(self.faults)}"
        )


class Engines:
    """vLLMs that are started again when they have ended."""

    def __init__(self, servers: Sequence[VllmServer], causes: Counter[str]) -> None:
        self._servers, self._causes = servers, causes
        self.ended = 0
        self._watches: list[asyncio.Task[None]] = []
        engines = [VllmEngine(server.url, name=str(n)) for n, server in enumerate(servers)]
        self.router = Router(engines, check_interval_s=1.0, patience_s=PATIENCE_S, vocab_size=10**6)

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self._servers))
        self._watches = [asyncio.create_task(self._watch(server)) for server in self._servers]
        await self.router.start()

    async def close(self) -> None:
        await self.router.close()
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def _watch(self, server: VllmServer) -> None:
        while True:
            await server.wait()
            self.ended += 1
            self._causes[server.last_words()] += 1
            await server.stop()
            await server.start()

    async def call(self, prompt: Sequence[int], session: str) -> FinishReason | None:
        """Why its answer ended; None if it is not whole."""
        count, finish = 0, None

        def take(chunk: Chunk) -> None:
            nonlocal count, finish
            count, finish = count + len(chunk.ids), chunk.finish_reason

        generation = Generation(
            self.router,
            np.array(prompt, np.int32),
            Sampling(max_tokens=ANSWER_TOKENS),
            request_id=f"{session}#0",
            session_id=session,
        )
        await generation.sample(take, lambda _: None)
        return finish if finish != "length" or count == ANSWER_TOKENS else None


async def poison(minutes: float, every_s: float, rng: random.Random, folder: Path) -> Report:
    report = Report()
    config = VllmConfig(max_context_tokens=1024, nice=1, env=write_plugin(folder / "plugin"))
    servers = [
        VllmServer(config, MODEL, log=folder / f"vllm{n}.log", dtype="float32") for n in range(2)
    ]
    engines, loop = Engines(servers, report.causes), asyncio.get_running_loop()

    def prompt() -> list[int]:
        return [rng.randrange(10, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]

    async def agent(number: int, end: float) -> None:
        turn = 0
        while loop.time() < end:
            begun, turn = loop.time(), turn + 1
            try:
                if await engines.call(prompt(), f"s{number}-{turn}") is None:
                    report.faults["an answer was not whole"] += 1
            except (EngineError, RequestError) as error:
                report.faults[f"a call failed with {type(error).__name__}"] += 1
            report.answered += 1
            report.waits_s.append(loop.time() - begun)
            await asyncio.sleep(PAUSE_S * rng.random())

    async def poisonous(end: float) -> None:
        number = 0
        while loop.time() + every_s < end:
            before, number = engines.ended, number + 1
            try:
                await engines.call([*POISON, *prompt()], f"p{number}")
            except RequestError as error:
                if error.code != "engines_lost":
                    report.faults[f"a poisonous request was refused with {error!r}"] += 1
            else:
                report.faults["a poisonous request was answered"] += 1
            await asyncio.sleep(every_s)
            report.deaths[engines.ended - before] += 1  # a process ends a moment after its engine

    async def progress() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            print(report, flush=True)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(engines.close)
        await engines.start()
        said, end = asyncio.create_task(progress()), loop.time() + 60 * minutes
        stack.callback(said.cancel)
        async with asyncio.TaskGroup() as group:
            for number in range(AGENTS):
                group.create_task(agent(number, end))
            group.create_task(poisonous(end))
    if most := [count for count in report.deaths if count > ENGINES_LOST_LATE]:
        report.faults[f"a request ended {max(most)} engines"] += 1
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.real_poison", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between such requests")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        rng = random.Random(given.seed)
        report = asyncio.run(poison(given.minutes, given.every, rng, Path(folder)))
        print(f"seed {given.seed}: {report}")
        return int(bool(report.faults))
    return 130


if __name__ == "__main__":
    sys.exit(main())
