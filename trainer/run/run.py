"""One run: its parts, its folder, and what it goes on from; opened as a `Fit` that can begin.

Invariant: leaving `open_fit` ends the agents first, then the engines and the proxy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agent_loop.remote_agent_loop import RemoteAgentLoop
from trainer.cluster import open_cluster
from trainer.config import TrainerConfig
from trainer.fit import Fit, Producer
from trainer.run.assembly import Parts
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog
from trainer.run.services import running_services


@dataclass(slots=True)
class Run:
    config: TrainerConfig
    parts: Parts
    folder: RunFolder
    log: RunLog
    control: RunControl


@asynccontextmanager
async def open_fit(
    run: Run, make_producer: Callable[[RemoteAgentLoop], Producer]
) -> AsyncIterator[Fit]:
    """Starts the processes, restores what was saved, and yields a `Fit` that can `run`."""
    config, parts, folder, control = run.config, run.parts, run.folder, run.control
    tell = run.log.progress.say
    async with (
        open_cluster(config, folder, control) as cluster,
        cluster.trainer(parts.probe.tolist()) as trainer,
    ):
        state = await control.wait_for(trainer.restore())
        run.log.progress.phase(trainer.step, "starting the engine and the proxy")
        async with running_services(config, folder, control, cluster, trainer, tell) as proxy:
            loop = parts.loop(config, folder, proxy)
            producer, evaluator = make_producer(loop), parts.evaluator(config, loop)
            fit = Fit(config, trainer, producer, evaluator, run.log, control)
            if state:
                fit.best, fit.produced = state["best"], state["producer"]
            try:
                yield fit
            finally:
                await producer.close()
                await loop.close()
