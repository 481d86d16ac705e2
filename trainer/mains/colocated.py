"""Mode `colocated`: samples and trains in turn, so that every batch is from the newest weights."""

from __future__ import annotations

from agent_loop.producers.protocol import RunsTrials
from agent_loop.producers.sync import SyncProducer
from proxy.client import ProxyClient
from trainer.assembly import TaskParts
from trainer.mains.opening import open_fit
from trainer.run.control import Ended, RunControl
from trainer.run.log import RunLog


async def train(parts: TaskParts, log: RunLog, control: RunControl) -> Ended:
    config = parts.config

    def producer(loop: RunsTrials, _: ProxyClient) -> SyncProducer:
        return SyncProducer(loop, parts.tasks, config.rollout, seed=config.trainer.seed)

    async with open_fit(parts, log, control, producer) as fit:
        return await fit.run()
