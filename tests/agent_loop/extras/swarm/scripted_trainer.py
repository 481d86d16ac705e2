"""A trainer without a model that a swarm server starts: `scripted_trainer.py CHECKPOINT BATCHES`.

Starts a proxy over a scripted engine, takes batch after batch, and writes each as a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

from agent_loop.extras.swarm.config import SwarmConfig
from agent_loop.extras.swarm.producer import SwarmProducer
from agent_loop.extras.swarm.trainer_process import server_of_trainer
from agent_loop.extras.swarm.wire import TrainerHello
from agent_loop.producers.rollout_config import RolloutConfig
from proxy.app import build_app
from proxy.config import load_config
from proxy.testing.scripted_engine import ScriptedEngine

ADMIN_KEY = "admin-key-of-the-tests"


async def main(checkpoint: Path, batches: Path) -> None:
    async with ScriptedEngine(lambda prompt: [*prompt[-3:], 257]) as engine:
        store = f"sqlite:///{batches.parent}/proxy-{os.getpid()}.db"
        config = load_config(
            None,
            model=checkpoint,
            engines=[{"url": engine.url}],
            store=store,
            admin_key=ADMIN_KEY,
        )
        runner = web.AppRunner(build_app(config))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hello = TrainerHello(
            proxy_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
            proxy_admin_key=ADMIN_KEY,
            rollout=RolloutConfig(groups_per_step=1, group_size=2, max_tokens=4),
            swarm=SwarmConfig(stop_rule="episodes"),
        )
        server = server_of_trainer()
        assert server is not None
        producer = SwarmProducer(*server, hello)
        version = 0
        while True:
            groups = await producer.next_batch(version)
            version += 1
            episodes = [rollout.trial_id for group in groups for rollout in group.rollouts]
            with batches.open("a") as file:
                file.write(json.dumps({"pid": os.getpid(), "episodes": episodes}) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*map(Path, sys.argv[1:])))
