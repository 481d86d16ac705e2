"""Sample, then train, on the same devices: every batch is from the newest weights."""

from __future__ import annotations

from agent_loop.producers.sync import SyncProducer
from trainer.assembly import Parts, batch_settings
from trainer.config import TrainerConfig
from trainer.controller import TrainController
from trainer.run_control import RunControl
from trainer.run_folder import RunFolder
from trainer.run_log import RunLog
from trainer.services import running_services
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync


async def train(
    config: TrainerConfig, parts: Parts, folder: RunFolder, log: RunLog, control: RunControl
) -> str:
    """Runs to the end; `done` or `stopped`."""
    log.progress.phase(0, "starting the engine and the proxy")
    async with running_services(config, folder, control) as services:
        loop = parts.loop(config, folder, services.proxy)
        producer = SyncProducer(loop, parts.tasks, batch_settings(config), seed=config.trainer.seed)
        sync = WeightSync(EngineControl(services.engine_urls), config.engine.weight_transfer)
        controller = TrainController(config, parts.learner, sync)
        controller.probe = parts.probe.tolist()
        try:
            return await controller.fit(producer, parts.evaluator(config, loop), log, control)
        finally:
            sync.close()
            await loop.close()
