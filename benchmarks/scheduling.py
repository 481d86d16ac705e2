"""Scheduled against first come first served, on a real vLLM whose cache holds few of the agents.

Agents talk in turns and pause at their tools in between; each prompt extends the path of the turn
before by a tool's output. Both ways sample the same calls (same prompts and pauses, temperature 0,
the same server and code), in turn, with an empty prefix cache at the start of each. With
`--host-gib`, once more on a server with a host tier (vLLM's own on a GPU; on a CPU
`tests/e2e/host_tier.py`). The model has
random weights: the figures are about its size and the cache, not about what it says.
`python -m benchmarks.scheduling` prints the table of docs/notes/scale.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np

from proxy.engines import vllm_platform
from proxy.engines.address import EngineAddress
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.extras.schedule.admission import CacheAdmission
from proxy.extras.schedule.section import SchedulingConfig
from proxy.routing.cache_room import RoomClaim
from proxy.routing.generation import Generation
from proxy.routing.router import Router
from tests.e2e.tiered_server import tiered_arguments

TOKENIZER = Path("examples/quickstart/model")
BLOCK_TOKENS = 32
"""The smallest that vLLM's attention on CPU supports."""
FIRST_TOKENS = 200
"""Tokens of an agent's first prompt: no two agents share them."""


@dataclass(frozen=True)
class Work:
    """What each agent does."""

    agents: int
    turns: int
    new_tokens: int
    """Prompt tokens that a turn adds (a tool's output)."""
    answer_tokens: int
    pause_s: float
    """Median of the times at tools; log-normal with sigma 1."""


@dataclass
class Figures:
    """One way of running the work."""

    seconds: float = 0.0
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    calls_s: list[float] = field(default_factory=list)
    paused_s: list[float] = field(default_factory=list)
    cached: float = 0.0
    """Share of the prompt tokens that the engine had in its cache or in its host tier, by its own
    count."""
    loaded: float = 0.0
    """Share that it had in its host tier only."""

    @property
    def tokens_s(self) -> float:
        return sum(map(len, self.answers.values())) / self.seconds

    def row(self, way: str) -> str:
        calls = np.array(self.calls_s)
        return (
            f"| {way} | {self.seconds:.0f} | {self.tokens_s:.1f} | {self.cached:.0%} | "
            f"{self.loaded:.0%} | "
            f"{np.median(calls):.1f} / {np.quantile(calls, 0.99):.1f} | "
            f"{max(self.paused_s, default=0.0):.1f} |"
        )


def write_model(folder: Path, *, layers: int, hidden: int) -> int:
    """A Qwen3 with random weights. Returns the numbers that a token takes in the KV cache."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        eos_token_id=1017,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder)
    return layers * 2 * 2 * 64


def _add_ids(ids: list[int], chunk: Chunk) -> None:
    ids += chunk.ids


async def agent(number: int, router: Router, work: Work, figures: Figures) -> None:
    rng = random.Random(number)
    session = f"agent-{number}"
    path = [rng.randrange(3, 1000) for _ in range(FIRST_TOKENS)]
    for turn in range(work.turns):
        began = time.perf_counter()
        # Greedy, also because vLLM 0.32 on CPU ends if a seeded call's prefill is split.
        sampling = Sampling(work.answer_tokens, temperature=0.0)
        call_id = f"{session}#{turn}"
        claim = RoomClaim(call_id, session, len(path), work.answer_tokens)
        answer: list[int] = []
        await router.until_admitted(claim, trained=False, adapted=False)
        try:
            prompt = np.array(path, np.int32)
            call = Generation(router, prompt, sampling, request_id=call_id, session_id=session)
            await call.sample(partial(_add_ids, answer), lambda _: None)
        finally:
            router.left(claim, len(path) + len(answer), len(answer))
        figures.calls_s.append(time.perf_counter() - began)
        figures.answers[number, turn] = answer
        path += answer
        path += [rng.randrange(3, 1000) for _ in range(work.new_tokens)]
        await asyncio.sleep(rng.lognormvariate(np.log(work.pause_s), 1.0))
    router.forget(session)


async def run(server: VllmServer, work: Work, *, scheduled: bool) -> Figures:
    figures = Figures()
    admission = None
    if scheduled:
        admission = CacheAdmission(
            SchedulingConfig(),
            on_admitted=lambda waited_s, overdue: figures.paused_s.append(waited_s),
        )
    engine = VllmEngine(server.url)
    router = Router([engine], vocab_size=1024, admission=admission)
    try:
        await router.check()
        await request(server, "POST", "/reset_prefix_cache?reset_external=true")
        hits, loaded, queries = await prefix_cache(server)
        began = time.perf_counter()
        await asyncio.gather(*(agent(n, router, work, figures) for n in range(work.agents)))
        figures.seconds = time.perf_counter() - began
        now_hits, now_loaded, now_queries = await prefix_cache(server)
        asked = max(1.0, now_queries - queries)
        figures.loaded = (now_loaded - loaded) / asked
        figures.cached = (now_hits - hits) / asked + figures.loaded
        return figures
    finally:
        await router.close()


async def prefix_cache(server: VllmServer) -> tuple[float, float, float]:
    """The tokens that the server found in its prefix cache, the further ones that it found in its
    host tier, and those that it looked for."""
    text = await request(server, "GET", "/metrics")
    counts = {
        name: sum(map(float, re.findall(rf"^vllm:{name}_total\S* (\S+)", text, re.M)))
        for name in ("prefix_cache_hits", "external_prefix_cache_hits", "prefix_cache_queries")
    }
    hits, loaded, queries = counts.values()
    return hits, loaded, queries


async def request(server: VllmServer, method: str, path: str) -> str:
    address = EngineAddress.parse(server.url)
    async with (
        aiohttp.ClientSession(headers=address.headers) as http,
        http.request(method, address.url + path) as response,
    ):
        response.raise_for_status()
        return await response.text()


async def compare(arguments: argparse.Namespace) -> None:
    work = Work(
        arguments.agents,
        arguments.turns,
        arguments.new_tokens,
        arguments.answer_tokens,
        arguments.pause_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        numbers = write_model(model, layers=arguments.layers, hidden=arguments.hidden)
        token_bytes = numbers * (4 if _on_cpu() else 2)
        blocks = arguments.cache_mib * 2**20 // token_bytes // BLOCK_TOKENS
        print(f"cache: {blocks * BLOCK_TOKENS} tokens, {token_bytes} bytes each", flush=True)
        log = arguments.log or Path(folder) / "vllm.log"
        print(
            "| way | seconds | sampled tokens/s | prompt tokens cached | of all, from the host | "
            "call, s (p50 / p99) | longest pause, s |\n|---|---|---|---|---|---|---|"
        )
        first: Figures | None = None
        for gib in (0.0, arguments.host_gib) if arguments.host_gib else (0.0,):
            args = ("--num-gpu-blocks-override", str(blocks), "--block-size", str(BLOCK_TOKENS))
            # vLLM must have room for one sequence, and keeps a block for itself.
            context = min(8192, (blocks - 1) * BLOCK_TOKENS)
            config = VllmConfig(max_context_tokens=context, args=(*args, *tier_arguments(gib)))
            dtype = "float32" if _on_cpu() else "bfloat16"
            async with VllmServer(config, model, log=log, dtype=dtype) as server:
                await run(server, Work(2, 2, 100, 8, 0.1), scheduled=False)
                tier = f", host tier of {gib:g} GiB" if gib else ""
                for _ in range(arguments.repeats):
                    plain = await run(server, work, scheduled=False)
                    first = first or plain
                    print(plain.row(f"first come first served{tier}"), flush=True)
                    planned = await run(server, work, scheduled=True)
                    print(planned.row(f"scheduled{tier}"), flush=True)
                    print(
                        f"\n{planned.tokens_s / plain.tokens_s:.2f} x tokens/s, "
                        f"{planned.tokens_s / first.tokens_s:.2f} x those of the first row; "
                        f"{same_answers(first, plain)}, {same_answers(first, planned)}\n"
                    )


def _on_cpu() -> bool:
    return vllm_platform.installed() is vllm_platform.CPU


def tier_arguments(gib: float) -> tuple[str, ...]:
    if not gib:
        return ()
    return tiered_arguments(gib=gib) if _on_cpu() else ("--kv-offloading-size", str(gib))


def same_answers(one: Figures, other: Figures) -> str:
    """How many answers are equal."""
    same = sum(answer == other.answers[key] for key, answer in one.answers.items())
    return f"{same} of {len(one.answers)} answers are equal"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--pause-s", type=float, default=0.2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--cache-mib", type=int, default=64)
    parser.add_argument("--host-gib", type=float, default=0.0, help="host tier; 0: without")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--log", type=Path, help="the server's log; default: not kept")
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
