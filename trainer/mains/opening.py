"""Starts the processes of a run around its parts, and gives a `Fit` that is ready to run.

Invariant: whatever was started has ended when `open_fit` has, agents first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agent_loop.producers.protocol import Producer, RunsTrials
from proxy.client import ProxyClient
from trainer.assembly import RunParts
from trainer.checkpoint import Checkpoints, CheckpointUploads, open_mirror
from trainer.cluster.rank_zero import Restore
from trainer.cluster.registry import open_cluster
from trainer.cluster.services import RunServices
from trainer.cluster.starting import StartingEngines
from trainer.fit import Fit
from trainer.run.control import RunControl
from trainer.run.log import RunLog


@asynccontextmanager
async def open_fit(
    parts: RunParts,
    log: RunLog,
    control: RunControl,
    make_producer: Callable[[RunsTrials, ProxyClient], Producer],
) -> AsyncIterator[Fit]:
    """Starts the processes, restores the last checkpoint, and yields a `Fit` that can `run`.

    Engines start, agents' modules are imported and models are loaded at the same time. On exit it
    ends the agents first, then the engines and the proxy.
    """
    config, folder, say = parts.config, log.folder, log.progress.say
    checkpoints = Checkpoints(folder.checkpoints.absolute(), keep_last=config.trainer.keep_last)
    keep_last = config.trainer.keep_last
    mirror = open_mirror(config.trainer.checkpoint_mirror, keep_last=keep_last)
    uploads = CheckpointUploads(mirror)
    async with (
        open_cluster(config, folder, control) as cluster,
        StartingEngines(cluster, config.engine, control) as starting,
        parts.agents_started(),
        cluster.trainer(parts.probe.tolist()) as rank_zero,
    ):
        state = await control.wait_for(rank_zero.ask(Restore(checkpoints)))
        uploads.start(checkpoints.latest(), folder)
        for warning in {agent.sandbox_warning for agent in config.agent_sections.values()}:
            if warning is not None:
                say(warning)
        log.phase(state.step, "starting the engine and the proxy")
        around = RunServices(config, folder, control, cluster, rank_zero, say, starting)
        async with around.running() as services:
            if services.page is not None:
                say(f"see everything, live: {services.page}")
            loop = parts.loop(
                folder,
                services.proxy,
                cluster.private_paths,
                cluster.private_ports,
                log.trial_ended,
            )
            producer = parts.own_producer(loop) or make_producer(loop, services.proxy)
            log.follow(producer)
            evaluator = parts.evaluator(loop)
            preflight = parts.preflight(loop, folder, say)
            fit = Fit(
                config.trainer,
                config.eval,
                rank_zero,
                services.engines,
                producer,
                evaluator,
                checkpoints,
                log,
                control,
                uploads,
                preflight=None if preflight is None else preflight.run,
                trials_per_step=parts.trials_per_step,
            )
            fit.resume_from(state)
            try:
                yield fit
            finally:
                await producer.close()
                await loop.close()
