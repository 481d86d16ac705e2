"""Our proxy, a bare pass-through, and other proxies on the same fake vLLM.

All are measured in one run on one machine, so that their ratios can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from itertools import product
from pathlib import Path

import uvloop

from benchmarks.proxy import kills, long_sessions, peers, real_vllm, small_calls, streams, targets

CACHE = Path(".cache/bench-proxy")
PARTS = ("small-calls", "in-turns", "kills", "turns", "streams", "memory", "real-vllm")
TARGETS = (
    "pass-through",
    "ours",
    "ours-json",
    "ours-2-workers",
    "vllm-router",
    "rllm",
    "portkey",
    "litellm",
    "agent-lightning",
)
RECORDING = ("ours", "rllm", "agent-lightning")
Starters = dict[str, Callable[[], AbstractContextManager[targets.Target]]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds per row of small calls")
    parser.add_argument("--rounds", type=int, default=12, help="of measurements in turns")
    parser.add_argument("--calls", type=int, default=500, help="answered before a kill")
    parser.add_argument("--streams", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--sessions", type=int, default=1000, help="128k-token sessions in memory")
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    parts = {
        "small-calls": _small_calls,
        "in-turns": _in_turns,
        "kills": _kills,
        "turns": _turns,
        "streams": _streams,
        "memory": _memory,
        "real-vllm": _real_vllm,
    }
    for part in arguments.parts:
        print(f"\n## {part}\n", flush=True)
        parts[part](arguments)


def _small_calls(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch, targets.fake_vllm() as upstream:
        starters = _starters(upstream, Path(scratch))
        print(small_calls.HEADER)
        direct = {}
        for n in arguments.clients:
            url = f"{upstream}/v1/chat/completions"
            direct[n] = small_calls.run_load(url, {}, n, arguments.seconds)
            print(small_calls.direct_row(n, direct[n]), flush=True)
        for name in arguments.targets:
            with starters[name]() as target:
                for n in arguments.clients:
                    cell = small_calls.measure(target, n, arguments.seconds)
                    print(small_calls.row(cell, direct[n]), flush=True)


def _in_turns(arguments: argparse.Namespace) -> None:
    with ExitStack() as running, tempfile.TemporaryDirectory() as scratch:
        starters = _starters(running.enter_context(targets.fake_vllm()), Path(scratch))
        started = [
            running.enter_context(starters[n]()) for n in ("pass-through", "ours", "ours-json")
        ]
        print(small_calls.RATIOS, flush=True)
        for row in small_calls.in_turns(started, clients=32, rounds=arguments.rounds):
            print(row, flush=True)


def _starters(upstream: str, scratch: Path) -> Starters:
    """`TARGETS` → what starts it."""
    return {
        "pass-through": lambda: targets.pass_through(upstream),
        "ours": lambda: targets.ours(upstream, scratch),
        "ours-json": lambda: targets.ours(f"{upstream}/json", scratch),
        "ours-2-workers": lambda: targets.ours(upstream, scratch, "--workers", "2"),
        "vllm-router": lambda: peers.vllm_router(upstream, CACHE),
        "rllm": lambda: peers.rllm_gateway(upstream, CACHE, scratch),
        "portkey": lambda: peers.portkey(upstream, CACHE),
        "litellm": lambda: peers.litellm(upstream, CACHE),
        "agent-lightning": lambda: peers.agent_lightning(upstream, CACHE),
    }


def _kills(arguments: argparse.Namespace) -> None:
    """Of the targets that record."""
    print(kills.HEADER)
    for name in (each for each in RECORDING if each in arguments.targets):
        with tempfile.TemporaryDirectory() as scratch, targets.fake_vllm() as upstream:
            with _starters(upstream, Path(scratch))[name]() as target:
                found = asyncio.run(kills.kill(target, arguments.calls))
            print(found.row(), flush=True)


def _turns(_: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as scratch,
        targets.fake_vllm() as upstream,
        targets.pass_through(upstream) as plain,
        targets.ours(upstream, Path(scratch)) as target,
        targets.ours(f"{upstream}/json", Path(scratch)) as by_json,
    ):
        print(
            "| | turn | tokens | CPU ms | wall ms | pass-through | bytes | rest, µs per new token |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name, each in {"ours": target, "ours, JSON from the engine": by_json}.items():
            for cost in asyncio.run(long_sessions.turn_costs(each, plain, sessions=3)):
                print(
                    f"| {name} | {cost.turn:.0f} | {cost.prompt_tokens:,.0f} | {cost.cpu_ms:.1f} "
                    f"| {cost.wall_ms:.1f} | {cost.plain_cpu_ms:.1f} | {cost.bytes_ms:.1f} "
                    f"| {cost.rest_us(long_sessions.NEW_TOKENS):.2f} |",
                    flush=True,
                )
        print("\n| first turn of a session | tokens | CPU ms | pass-through | bytes |")
        print("|---|---|---|---|---|")
        kinds = ("the first with this prompt", "others with it", "a short prompt")
        costs = asyncio.run(long_sessions.first_turn_costs(target, plain))
        for kind, cost in zip(kinds, costs, strict=True):
            print(
                f"| {kind} | {cost.prompt_tokens:,.0f} | {cost.cpu_ms:.2f} "
                f"| {cost.plain_cpu_ms:.2f} | {cost.bytes_ms:.2f} |"
            )


def _streams(arguments: argparse.Namespace) -> None:
    print("| tokens | streams | through | gap p50 ms | gap p99 ms | cores | CPU µs/token |")
    print("|---|---|---|---|---|---|---|")
    generate, chat = streams.generate_body(), streams.chat_body()
    times = {"each stream at its own times": [], "in steps": ["--in-steps"]}
    for (when, option), count in product(times.items(), arguments.streams):
        with (
            tempfile.TemporaryDirectory() as scratch,
            targets.fake_vllm("--tokens-per-s", str(streams.TOKENS_PER_S), *option) as upstream,
            targets.pass_through(upstream) as plain,
            targets.ours(upstream, Path(scratch)) as target,
            targets.ours(f"{upstream}/json", Path(scratch)) as by_json,
        ):
            url, through = f"{upstream}{streams.GENERATE}", f"{plain.origin}{streams.GENERATE}"
            rows = {
                "direct": streams.measure(url, generate, count, None),
                plain.name: streams.measure(through, generate, count, plain),
                "ours": streams.measure(target.url, chat, count, target),
                "ours, JSON from the engine": streams.measure(by_json.url, chat, count, by_json),
            }
            for name, row in rows.items():
                gaps = uvloop.run(row)
                print(
                    f"| {when} | {count} | {name} | {gaps.p50_ms:.1f} | {gaps.p99_ms:.1f} "
                    f"| {gaps.cpu_share:.2f} | {gaps.cpu_us_per_token:.1f} |",
                    flush=True,
                )


def _memory(arguments: argparse.Namespace) -> None:
    with (
        tempfile.TemporaryDirectory() as scratch,
        targets.fake_vllm() as upstream,
        targets.ours(upstream, Path(scratch)) as target,
    ):
        before, after = asyncio.run(long_sessions.memory_mb(target, arguments.sessions))
    print(f"{arguments.sessions} sessions of 128k tokens: {before:,.0f} MB, then {after:,.0f}")


def _real_vllm(_: argparse.Namespace) -> None:
    async def show() -> None:
        print(real_vllm.HEADER, flush=True)
        async for row in real_vllm.rows():
            print(row, flush=True)

    uvloop.run(show())


if __name__ == "__main__":
    main()
