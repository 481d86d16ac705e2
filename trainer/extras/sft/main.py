"""Supervised fine-tuning: trains on recorded sessions, without engines, a proxy or agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.config import RenderingConfig
from trainer.algorithms import AlgorithmConfig
from trainer.checkpoint import Checkpoints, CheckpointUploads, open_mirror
from trainer.cluster.device_plan import fitted, gpus_here
from trainer.cluster.rank_zero import Restore
from trainer.cluster.ranks import device_of
from trainer.cluster.registry import open_cluster
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import Demonstration, read_demonstrations
from trainer.extras.sft.fit import SftFit
from trainer.extras.sft.schedule import Schedule, split
from trainer.optimizer_config import OptimizerConfig, check_optimizer
from trainer.policy.model_config import context_limit, load_settings
from trainer.run.control import Ended, RunControl
from trainer.run.log import RunLog
from trainer.schedules import TRIAL_STEPS, warmup_beyond

NO_ENGINE = {"replicas": 0, "sleep": False, "weight_transfer": "shm"}
"""Keys of the section `engine` of a run that samples nothing, so that no GPU is kept for it."""


@dataclass(frozen=True, slots=True)
class SftParts:
    """The parts of a run of fine-tuning that exist before any process is started."""

    config: TrainerConfig
    """With the number of steps that the sessions make, and without engines and the parts of the
    algorithm, which imitation does not use."""
    sft: SftConfig
    schedule: Schedule
    held_out: Sequence[Demonstration]
    digest: str
    note: str
    """What is trained on, for the first lines of the run."""
    main: str = "sft"


def assemble(config: TrainerConfig) -> SftParts:
    """Reads the recorded sessions, and checks what can be checked before a process is started.

    Raises:
        ConfigError, proxy.errors.ConfigurationError: one line that names the key or file.
    """
    sft, server = config.sft, config.proxy_server
    if not isinstance(sft, SftConfig):
        raise ConfigError("sft.sessions: missing; give the folder or store of recorded sessions")
    check_optimizer(config.optimizer)
    context_tokens = context_limit(load_settings(config.model.path))
    rendering = RenderingConfig(renderer=server.renderer, template_kwargs=server.template_kwargs)
    demonstrations = asyncio.run(
        read_demonstrations(
            sft,
            config.model.path,
            rendering,
            context_tokens,
            reads_images=config.model.vision != "text",
        )
    )
    seed = config.trainer.seed
    train, held_out = split(demonstrations.found, sft.held_out, seed)
    schedule = Schedule(train, sft.batch_sessions, sft.epochs, seed)
    _check_warmup(config.optimizer, schedule)
    updates = {
        "trainer": config.trainer.model_copy(update={"steps": schedule.steps}),
        "algorithm": AlgorithmConfig(prox="reuse"),
        "engine": config.engine.model_copy(update=NO_ENGINE),
        "logging": config.logging.model_copy(update={"metrics": ()}),
    }
    note = f"{demonstrations.describe()}; {len(held_out)} sessions are held out"
    derived = config.model_copy(update=updates)
    if derived.cluster.backend == "local":
        device_of(derived.trainer.device)
        derived = fitted(derived, gpus_here())
    return SftParts(derived, sft, schedule, held_out, demonstrations.digest, note)


def _check_warmup(optimizer: OptimizerConfig, schedule: Schedule) -> None:
    """Raises ConfigError if the learning rate's warm-up is longer than the run."""
    fault = warmup_beyond("optimizer", optimizer, schedule.steps)
    if fault is not None and schedule.steps > TRIAL_STEPS:
        raise ConfigError(
            f"{fault}, or raise sft.epochs={schedule.epochs}, which has "
            f"{schedule.steps_per_epoch} steps each"
        )


async def train(parts: SftParts, log: RunLog, control: RunControl) -> Ended:
    config, folder = parts.config, log.folder
    log.progress.say(parts.note)
    checkpoints = Checkpoints(folder.checkpoints.absolute(), keep_last=config.trainer.keep_last)
    keep_last = config.trainer.keep_last
    mirror = open_mirror(config.trainer.checkpoint_mirror, keep_last=keep_last)
    uploads = CheckpointUploads(mirror)
    async with (
        open_cluster(config, folder, control) as cluster,
        cluster.trainer([]) as rank_zero,
    ):
        state = await control.wait_for(rank_zero.ask(Restore(checkpoints)))
        uploads.start(checkpoints.latest(), folder)
        fit = SftFit(
            parts.sft,
            config.trainer,
            rank_zero,
            parts.schedule,
            parts.held_out,
            parts.digest,
            checkpoints,
            log,
            control,
            uploads,
        )
        fit.resume_from(state)
        return "done" if await fit.run() else "stopped"
