"""A template for a training loop of your own, which calls the public steps.

    python -m trainer.mains.low_level --config my.yaml [key=value …]

Copy this file: everything in `train` is a call that you may replace, repeat or leave out. It
samples, then trains, in one process; it saves once, at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from agent_loop.producers.groups import rollout_seed
from agent_loop.producers.protocol import RunsTrials
from agent_loop.records import Group, Task
from agent_loop.tasks import TaskStream
from proxy.records import SessionKind
from trainer.algorithms.token_loss import Metrics
from trainer.assembly import SwarmParts, assemble
from trainer.batch import trained_batch
from trainer.checkpoint import Checkpoints
from trainer.cluster.engines import RunEngines
from trainer.cluster.local import LocalCluster
from trainer.cluster.rank_models import models_of_rank
from trainer.cluster.rank_zero import OneThread, RankZero
from trainer.cluster.services import RunServices
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.learning.learner import Learner
from trainer.learning.policies import Learners
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.settings.sources import load


async def train(
    learner: Learner, engines: RunEngines, agents: RunsTrials, tasks: TaskStream
) -> list[Metrics]:
    """Runs the loop; returns the metrics of each step."""
    config, history = learner.config, list[Metrics]()
    await engines.send_weights()
    while learner.step < config.trainer.steps:
        drawn = [tasks.draw() for _ in range(config.rollout.groups_per_step)]
        groups = [await sample(agents, task, learner, at) for at, task in enumerate(drawn)]
        batch = trained_batch(groups)
        with learner.engines_asleep():  # if `engine.sleep` is set, their memory is the trainer's
            metrics = learner.compute_logprobs(batch)
            learner.compute_ref_logprobs(batch)
            learner.compute_values(batch)
            metrics |= learner.compute_advantages(batch)
            metrics |= learner.update(batch)
        metrics |= await engines.send_weights()
        metrics["reward/mean"] = float(batch.rewards.mean())
        history.append(metrics)
        print(f"step {learner.step}: reward {metrics['reward/mean']:.3f}")  # noqa: T201
    return history


async def sample(agents: RunsTrials, task: Task, learner: Learner, number: int) -> Group:
    """Group `number` of a step, of one task, whose trials run at the same time."""
    places = range(learner.config.rollout.group_size)
    seed, step = learner.config.trainer.seed, learner.step
    seeds = [rollout_seed(seed, step, number, place) for place in places]
    trials = [
        agents.run(task, kind=SessionKind.TRAIN, seed=seed, version=learner.version)
        for seed in seeds
    ]
    return Group(f"step-{step}-{number}", task, list(await asyncio.gather(*trials)))


async def run(config: TrainerConfig) -> list[Metrics]:
    """Starts the engines and the proxy around `train`, and saves at the end."""
    parts, control = assemble(config), RunControl()
    if isinstance(parts, SwarmParts) or config.trainer.policies:
        raise ConfigError("swarm, trainer.policies: this loop draws its tasks for one policy")
    folder = RunFolder.create(config.trainer.run_dir)
    learner = Learner(config, models_of_rank(config), parts.probe.tolist())
    cluster = LocalCluster(config, folder, control)
    with OneThread(Learners.of(learner)) as thread:
        around = RunServices(config, folder, control, cluster, RankZero(thread.send), print)
        async with around.running() as services:
            agents = parts.loop(
                folder, services.proxy, cluster.private_paths, cluster.private_ports
            )
            history = await train(learner, services.engines, agents, parts.tasks)
            await agents.close()
    learner.save(Checkpoints(folder.checkpoints, keep_last=1), {})
    return history


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, action="append", required=True)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    asyncio.run(run(load(arguments.config, arguments.overrides, os.environ)))


if __name__ == "__main__":
    main()
