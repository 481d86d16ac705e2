"""Sample, then train, on the same devices: every batch is from the newest weights."""

from __future__ import annotations

from agent_loop.producers.sync import SyncProducer
from agent_loop.remote_agent_loop import RemoteAgentLoop
from trainer.run.assembly import batch_settings
from trainer.run.run import Run, open_fit


async def train(run: Run) -> str:
    """Runs to the end; `done` or `stopped`."""
    config = run.config

    def producer(loop: RemoteAgentLoop) -> SyncProducer:
        settings = batch_settings(config)
        return SyncProducer(loop, run.parts.task_stream, settings, seed=config.trainer.seed)

    async with open_fit(run, producer) as fit:
        return await fit.run()
