"""Mode `separate`: samples and trains at the same time, within a bound on staleness."""

from __future__ import annotations

from contextlib import closing

from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer
from agent_loop.producers.protocol import RunsTrials
from proxy.client import ProxyClient
from trainer.assembly import TaskParts
from trainer.mains.opening import open_fit
from trainer.run.control import Ended, RunControl
from trainer.run.log import RunLog


async def train(parts: TaskParts, log: RunLog, control: RunControl) -> Ended:
    config = parts.config

    with closing(ReplayBuffer(log.folder.buffer)) as buffer:

        def producer(loop: RunsTrials, _: ProxyClient) -> AsyncProducer:
            tasks, seed = parts.tasks, config.trainer.seed
            return AsyncProducer(loop, tasks, config.rollout, seed=seed, buffer=buffer)

        async with open_fit(parts, log, control, producer) as fit:
            return await fit.run()
