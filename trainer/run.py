"""One run: its parts, its folder, and what it goes on from; opened as a `Fit` that can begin.

Invariant: leaving `open_fit` ends the agents first, then the engines and the proxy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

from agent_loop.remote_agent_loop import RemoteAgentLoop
from trainer.assembly import Parts
from trainer.checkpoint import Checkpoints, Saved
from trainer.config import TrainerConfig
from trainer.controller import TrainController
from trainer.fit import Fit, Producer
from trainer.run_control import RunControl
from trainer.run_folder import RunFolder
from trainer.run_log import RunLog
from trainer.services import running_services
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync


@dataclass(slots=True)
class Run:
    config: TrainerConfig
    parts: Parts
    folder: RunFolder
    log: RunLog
    control: RunControl
    checkpoints: Checkpoints
    saved: Saved | None = None
    """The checkpoint that it goes on from."""


@asynccontextmanager
async def open_fit(
    run: Run, make_producer: Callable[[RemoteAgentLoop], Producer]
) -> AsyncIterator[Fit]:
    """Starts the processes, restores what was saved, and yields a `Fit` that can `run`."""
    config, parts = run.config, run.parts
    state = _restore_learner(run)
    run.log.progress.phase(run.log.saved_step, "starting the engine and the proxy")
    tell = run.log.progress.say
    async with running_services(config, run.folder, run.control, tell) as services:
        loop = parts.loop(config, run.folder, services.proxy)
        control = EngineControl(services.engine_urls)
        with closing(WeightSync(control, config.engine.weight_transfer)) as sync:
            controller = TrainController(config, parts.learner, sync, parts.probe.tolist())
            producer, evaluator = make_producer(loop), parts.evaluator(config, loop)
            fit = Fit(controller, producer, evaluator, run.log, run.control, run.checkpoints)
            if state:
                controller.restore(state)
                fit.best, fit.produced = state["best"], state["producer"]
            try:
                yield fit
            finally:
                await producer.close()
                await loop.close()


def _restore_learner(run: Run) -> dict[str, Any]:
    """The run's part of the checkpoint; empty without one."""
    if run.saved is None:
        return {}
    learner = run.parts.learner
    learner.load_state_dict(run.checkpoints.load_state(run.saved, learner.state_dict()))
    return run.checkpoints.read_run(run.saved)
