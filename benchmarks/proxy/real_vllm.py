"""What an answer costs in a real vLLM's server and in the client, by the binary route and by JSON.

One vLLM samples for both, in turns, so that the ratios hold on a busy machine, too.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.proxy.targets import process_cpu_s
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmConfig, VllmServer

MODEL = Path("examples/quickstart/model")
CLIENTS = 48
CALLS = 4
"""Per client and round."""
ROUNDS = 5
TOKENS = 64
"""Per answer, unless it ends earlier."""
PROMPT = np.arange(20, 400, dtype=np.int32)

HEADER = (
    "| answers | route | vLLM's server, µs/token | client, µs/token | engine, µs/token |\n"
    "|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Processor time in µs per sampled token."""

    server: float
    client: float
    engine: float


async def rows() -> AsyncIterator[str]:
    """A row for streamed and for whole answers, by each route."""
    number = itertools.count()
    async with _engines() as (server_pid, engine_pid, engines):
        for stream in (True, False):
            costs: dict[str, list[Cost]] = {name: [] for name in engines}
            for _ in range(ROUNDS + 1):
                for name, engine in engines.items():
                    costs[name].append(await _round(engine, stream, number, server_pid, engine_pid))
            for name, (_, *measured) in costs.items():  # the first is the warm-up
                server = median(cost.server for cost in measured)
                client = median(cost.client for cost in measured)
                core = median(cost.engine for cost in measured)
                kind = "streamed" if stream else "whole"
                yield f"| {kind} | {name} | {server:.0f} | {client:.1f} | {core:.0f} |"


@asynccontextmanager
async def _engines() -> AsyncIterator[tuple[int, int, dict[str, VllmEngine]]]:
    with tempfile.TemporaryDirectory() as folder:
        config = VllmConfig(max_sequences=CLIENTS)
        async with VllmServer(config, MODEL, log=Path(folder, "vllm.log")) as server:
            frames, json = VllmEngine(server.url), VllmEngine(server.url)
            await frames.check()
            await json.check()
            assert frames._has_frames
            json._has_frames = False
            assert isinstance(server._process, asyncio.subprocess.Process)
            (server_pid,) = _children(server._process.pid)
            (engine_pid,) = _children(server_pid)
            yield server_pid, engine_pid, {"binary": frames, "JSON": json}
            await frames.close()
            await json.close()


async def _round(
    engine: VllmEngine, stream: bool, number: itertools.count[int], server: int, core: int
) -> Cost:
    tokens = 0

    def take(chunk: Chunk) -> None:
        nonlocal tokens
        tokens += len(chunk.ids)

    async def client() -> None:
        for _ in range(CALLS):
            sampling, name = Sampling(max_tokens=TOKENS), f"bench#{next(number)}"
            await engine.generate(PROMPT, sampling, take, request_id=name, stream=stream)

    def spent() -> Cost:
        return Cost(process_cpu_s(server), time.process_time(), process_cpu_s(core))

    before = spent()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    after = spent()
    return Cost(
        (after.server - before.server) / tokens * 1e6,
        (after.client - before.client) / tokens * 1e6,
        (after.engine - before.engine) / tokens * 1e6,
    )


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(each) for each in text.split()]
