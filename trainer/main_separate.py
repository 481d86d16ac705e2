"""Sample and train at the same time: the producer never stops, within a bound on staleness."""

from __future__ import annotations

from contextlib import closing

from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer
from agent_loop.remote_agent_loop import RemoteAgentLoop
from trainer.run.assembly import async_settings
from trainer.run.run import Run, open_fit


async def train(run: Run) -> str:
    """Runs to the end; `done` or `stopped`."""
    config = run.config

    with closing(ReplayBuffer(run.folder.buffer)) as buffer:

        def producer(loop: RemoteAgentLoop) -> AsyncProducer:
            settings, seed = async_settings(config), config.trainer.seed
            return AsyncProducer(loop, run.parts.task_stream, settings, seed=seed, buffer=buffer)

        async with open_fit(run, producer) as fit:
            return await fit.run()
