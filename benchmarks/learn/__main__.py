"""`python -m benchmarks.learn`: simulated users, and a model that learns what they like.

A user gives tasks in Git repositories, and likes one way of doing them, which the tasks do not say.
After a session the user rates it, or keeps or reverts its commit. A recorder, a vLLM and a learner
run as they would for a person; the learner looks at the record after each session.

    --show learn    the share of sessions that are as the user likes, before and after
    --show worse    a canary that is worse is rolled back
    --show poison   batches with contrary evidence, none of which is served
    --show swaps    20 promotions while users work
    --show forget   forgetting, against a learner that never had the sessions
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.learn import world
from benchmarks.learn.agent import AGENTS
from benchmarks.learn.daily import User, engine, show
from benchmarks.learn.harm import forgotten, poison, swaps, worse
from benchmarks.learn.model import make_model

_SHOWN = ("gate", "canary", "promote", "rollback")
_NOT_SHOWN = ("hash", "previous", "at")
HARM = {"worse": worse, "swaps": swaps, "forget": forgotten}


async def learns(
    folder: Path, engine_url: str, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A user whose preference is learned. In evaluations an agent that sends what mini-swe-agent
    sends is in its place."""
    evals = arguments.evals
    preference = world.PREFERENCES[seed % len(world.PREFERENCES)]
    user = User(preference, random.Random(seed + 100))
    async with show(folder, engine_url, user, seed, arguments.agent) as run:
        history, shown = run.learner.history, 0
        rates = {0: await run.evaluate(0, evals)}
        print(f"seed {seed}, {preference}: {rates[0]:.2f} before", flush=True)
        for number in range(arguments.sessions):
            await run.session(number)
            for line in run.learner.journal.lines[shown:]:
                if line["kind"] in _SHOWN:
                    said = {k: line[k] for k in line if k not in _NOT_SHOWN}
                    print(f"  seed {seed}, session {number + 1}: {said}", flush=True)
            shown = len(run.learner.journal.lines)
            if history.stable not in rates:
                rates[history.stable] = rate = await run.evaluate(history.stable, evals)
                print(f"  seed {seed}, adapter {history.stable}: {rate:.2f}", flush=True)
        if (canary := history.canary) is not None:
            found = history.comparison
            rates[canary] = await run.evaluate(canary, evals)
            words = f"{rates[canary]:.2f}, {found.counts}, better {found.better:.3g}"
            print(f"  seed {seed}, canary {canary}, undecided: {words}", flush=True)
        week = [liked for _, liked in run.outcomes]
        return {
            "preference": preference,
            "agent": arguments.agent,
            "before": rates[0],
            "after": rates[history.stable],
            "rates": rates,
            "liked_per_10": [sum(week[n : n + 10]) for n in range(0, len(week), 10)],
            "calls": run.calls,
            "seconds": {name: round(value) for name, value in run.seconds.items()},
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shows = ("learn", "worse", "poison", "swaps", "forget")
    parser.add_argument("--show", choices=shows, nargs="+", default=["learn"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--agent", choices=list(AGENTS), default="like-mini")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--evals", type=int, default=40)
    parser.add_argument("--batches", type=int, default=3, help="with --show poison")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    make_model(AGENTS[arguments.agent].model)
    with tempfile.TemporaryDirectory(prefix="learn-") as name:
        asyncio.run(_shown(arguments, Path(name)))
    return 0


async def _shown(arguments: argparse.Namespace, folder: Path) -> None:
    async with engine(folder, AGENTS[arguments.agent].model) as engine_url:
        for name, seed in itertools.product(arguments.show, arguments.seeds):
            own = folder / f"{name}{seed}"
            own.mkdir()
            if name == "learn":
                work = learns(own, engine_url, seed, arguments)
            elif name == "poison":
                work = poison(own, engine_url, seed, arguments.batches)
            else:
                work = HARM[name](own, engine_url, seed)
            started = time.monotonic()
            found = {"show": name, "seed": seed, **await work}
            wall_s = round(time.monotonic() - started)
            print(json.dumps({**found, "wall_s": wall_s}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
