"""What limits 10, 100 and 1,000 GPUs: the real router with simulated engines and agents.

Time is virtual: the clock jumps to the next timer. Each proxy has a real
`Router` and a real schedule, with its own view of the load, as in a deployment; its CPU
time is measured. Each fleet runs with and without the schedule. `benchmarks.simulated_engine`
describes what is simulated. `python -m benchmarks.scale` prints the tables of docs/notes/scale.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.simulated_engine import Figures, Model, Replica, replica
from proxy.engines.protocol import Sampling
from proxy.extras.schedule.admission import CacheAdmission
from proxy.extras.schedule.section import SchedulingConfig
from proxy.routing.cache_room import RoomClaim
from proxy.routing.generation import Generation
from proxy.routing.router import Router
from tests.agent_loop.virtual_time import run_in_virtual_time


async def agent(name: str, router: Router, model: Model, until_s: float, figures: Figures) -> None:
    """Runs conversations one after another; the first one starts somewhere in its middle."""
    rng = random.Random(name)
    loop = asyncio.get_running_loop()
    turn, talk = rng.randrange(model.turns), 0
    await asyncio.sleep(rng.uniform(0, 20))
    while loop.time() < until_s:
        session = f"{name}-{talk}"
        prompt = (turn + 1) * model.new_tokens + turn * model.sampled_tokens
        began = loop.time()
        ids = np.broadcast_to(np.int32(0), (prompt,))
        call = Generation(
            router, ids, Sampling(model.sampled_tokens), request_id=session, session_id=session
        )
        claim = RoomClaim(session, session, prompt, model.sampled_tokens)
        await router.until_admitted(claim, trained=False, adapted=False)
        await call.sample(lambda _: None, lambda _: None)
        router.left(claim, prompt + model.sampled_tokens, model.sampled_tokens)
        if began > figures.from_s:
            figures.waits_s.append(loop.time() - began)
        turn = (turn + 1) % model.turns
        talk += turn == 0
        if turn == 0:
            router.forget(session)
        await asyncio.sleep(rng.lognormvariate(np.log(model.agent_median_s), 1.2))


@dataclass(frozen=True)
class Fleet:
    """A fleet of GPUs and its agents."""

    gpus: int
    agents: int
    proxies: int
    share: int
    """Number of replicas that each proxy knows."""


async def simulate(
    fleet: Fleet, seconds: float, model: Model, scheduling: SchedulingConfig | None
) -> str:
    """A row of the table. Without `scheduling`, every call goes to an engine at once."""
    figures = Figures(from_s=seconds / 2)
    replicas = [replica(number, model, figures) for number in range(fleet.gpus)]
    routers = []
    for proxy in range(fleet.proxies):
        first = proxy * fleet.share
        known = [replicas[(first + i) % fleet.gpus] for i in range(fleet.share)]
        admission = None
        if scheduling is not None:
            admission = CacheAdmission(scheduling, on_admitted=figures.admitted)
        router = Router([each.view() for each in known], admission=admission)
        await router.check()
        routers.append(router)
    await asyncio.gather(
        *(
            agent(f"a{i}", routers[i % fleet.proxies], model, seconds, figures)
            for i in range(fleet.agents)
        )
    )
    hits = figures.hit_tokens / max(1, figures.prompt_tokens)
    loaded = figures.loaded_tokens / max(1, figures.prompt_tokens)
    peaks = np.array([each.peak for each in replicas])
    waits = np.array(figures.waits_s)
    way = "no" if scheduling is None else f"{scheduling.max_wait_s:.0f}"
    return (
        f"| {fleet.gpus} | {fleet.agents:,} | {fleet.proxies} of {fleet.share} | "
        f"{model.host_tokens or 'none'} | {way} | "
        f"{len(waits) / seconds * 2:,.1f} | {np.median(waits):.1f} / {np.quantile(waits, 0.99):.1f}"
        f" | {waits.mean():.1f} | {figures.longest_pause_s:.1f} | {hits:.0%} | "
        f"{loaded:.0%} | "
        f"{peaks.max() / peaks.mean():.2f} |"
    )


def choosing_us(replicas: int, sessions: int = 20_000) -> float:
    """CPU microseconds of one routed call among `replicas` replicas, without the engine's part."""
    model = Model(sampled_tokens=0, prefill_tokens_s=1e12)

    async def calls() -> None:
        router = Router([Replica(number, model, Figures(0.0)).view() for number in range(replicas)])
        ids = np.zeros(1, np.int32)
        for number in range(sessions):
            call = Generation(
                router, ids, Sampling(1), request_id=f"s{number}", session_id=f"s{number}"
            )
            await call.sample(lambda _: None, lambda _: None)

    before = time.process_time()
    run_in_virtual_time(calls())
    return (time.process_time() - before) / sessions * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="virtual; a schedule settles in 600"
    )
    parser.add_argument("--max-wait-s", type=float, nargs="*", default=[300.0])
    parser.add_argument(
        "--host-tokens", type=int, nargs="+", default=[0], help="size of a GPU's host tier; 0: none"
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--agents-per-gpu", type=int, nargs="+", default=[25, 50, 100])
    arguments = parser.parse_args()
    print("| replicas known to a proxy | CPU per routed call, µs |\n|---|---|")
    for replicas in (1, 10, 100, 1000):
        print(f"| {replicas} | {choosing_us(replicas, 2000 if replicas > 100 else 10000):.0f} |")
    print(
        "\n| GPUs | agents | proxies, of replicas each | host tier, tokens | "
        "scheduled: max_wait_s | calls/s | call, s (p50 / p99) | mean | "
        "longest pause, s | prompt tokens from the cache | "
        "of all prompt tokens from the host | busiest / mean replica |\n|---" + "|---" * 11 + "|"
    )
    ways = [
        None,
        *(SchedulingConfig(max_wait_s=wait_s) for wait_s in arguments.max_wait_s),
    ]
    for gpus in arguments.gpus:
        proxies = max(1, gpus // 50)
        for agents in arguments.agents_per_gpu:
            fleet = Fleet(gpus, gpus * agents, proxies, gpus // proxies)
            for tokens, way in product(arguments.host_tokens, ways):
                row = simulate(fleet, arguments.seconds, Model(host_tokens=tokens), way)
                print(run_in_virtual_time(row), flush=True)


if __name__ == "__main__":
    main()
