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
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.learn import world
from benchmarks.learn.daily import User, engine, show
from benchmarks.learn.harm import forgotten, poison, swaps, worse
from benchmarks.learn.model import make_model

_SHOWN = ("gate", "canary", "promote", "rollback")
_NOT_SHOWN = ("hash", "previous", "at")


async def learns(folder: Path, seed: int, sessions: int, evals: int) -> dict[str, Any]:
    """A user whose preference is learned."""
    preference = world.PREFERENCES[seed % len(world.PREFERENCES)]
    async with engine(folder, seed) as engine_url:
        user = User(preference, random.Random(seed + 100))
        async with show(folder, engine_url, user, seed) as run:
            rates = {0: await run.evaluate(0, evals)}
            print(f"seed {seed}, {preference}: {rates[0]:.2f} before", flush=True)
            for number in range(sessions):
                await run.session(number)
                stable = run.learner.history.stable
                if stable not in rates:
                    rates[stable] = await run.evaluate(stable, evals)
                    words = f"after session {number + 1}, adapter {stable}: {rates[stable]:.2f}"
                    print(f"  {words}", flush=True)
            if (canary := run.learner.history.canary) is not None:
                found = run.learner.history.comparison
                rates[canary] = await run.evaluate(canary, evals)
                words = f"won {found.won}, lost {found.lost} of {found.pairs} pairs"
                print(f"  canary {canary}: {rates[canary]:.2f}, {words}", flush=True)
            for line in run.learner.journal.lines:
                if line["kind"] in _SHOWN:
                    print("   ", {k: line[k] for k in line if k not in _NOT_SHOWN}, flush=True)
            return {"preference": preference, "rates": rates, "calls": run.calls}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shows = ("learn", "worse", "poison", "swaps", "forget")
    parser.add_argument("--show", choices=shows, default="learn")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--evals", type=int, default=40)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    make_model()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory(prefix="learn-") as name:
            folder = Path(name)
            if arguments.show == "learn":
                work = learns(folder, seed, arguments.sessions, arguments.evals)
            else:
                scenarios = {
                    "worse": worse,
                    "poison": poison,
                    "swaps": swaps,
                    "forget": forgotten,
                }
                work = scenarios[arguments.show](folder, seed)
            said = {"show": arguments.show, "seed": seed, **asyncio.run(work)}
            print(json.dumps(said), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
