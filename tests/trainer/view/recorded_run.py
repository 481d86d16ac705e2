"""A run's folder, written by the trainer's own code on sessions of a real proxy with a scripted
engine. Only the weights are missing: the trainer's log-probabilities are the engine's plus 0.01."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import yaml

from agent_loop.evaluator import EvalConfig, Evaluator
from agent_loop.records import AgentEnd, AgentResult, Graded, Group, Rollout, RolloutStatus, Task
from agent_loop.trial.outcome import Attempt, build_rollout
from proxy.records import Origin, Reward, SessionKind
from proxy.run_files.files import replace_file
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.extras.view.recording import SYSTEM, call, user
from trainer.algorithms import Algorithm, AlgorithmConfig
from trainer.batch import Batch, trained_batch
from trainer.run.folder import RunFolder
from trainer.run.log import LoggingConfig, RunLog
from trainer.run.rollout_metrics import mismatch_metrics, rollout_metrics, staleness_metrics
from trainer.run.token_log import TokenColumns

STEPS = 3
ANSWERS = (
    "The price of four lamps at seven each is 28.",
    "The price of four lamps is 4 + 7 = 11.",
    "The price of the lamps is 28, because 4 * 7 = 28.",
)
DIFFERENCE = 0.01


@dataclass(slots=True)
class ScriptedAgent:
    """Runs trials: two calls, whose answers depend on the seed and get better with the version."""

    proxy: RunningProxy
    question: str = "What do four lamps at seven each cost?"
    made: int = 0

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout:
        assert origin is None, "these trials begin with no recorded turns"
        self.made += 1
        began = time.time()
        name = f"lamps-{self.made}"
        session = await self.proxy.session(
            kind=kind, trial_id=name, metadata={"task": task.task_id}
        )
        messages = [{"role": "system", "content": SYSTEM}, user(self.question)]
        self.proxy.answers("Let me multiply the two numbers before I answer.")
        messages += [await call(self.proxy, session, messages), user("Go on.")]
        right = (seed + version) % 3 > 0
        self.proxy.answers(ANSWERS[(seed % 2) * 2 if right else 1])
        await call(self.proxy, session, messages)
        await self.proxy.control.add_reward(name, Reward("verifier", float(right)))
        await self.proxy.control.complete(name)
        _, turns = await self.proxy.control.get_turns(name)
        attempt = Attempt(name, task, kind, seed, version, started_at=began)
        agent = AgentResult(AgentEnd.EXITED, wall_s=1.5)
        times_s = {"opening": 0.125, "verifier": 0.5, "total": 2.5}
        return build_rollout(attempt, agent, turns, Graded(float(right)), times_s=times_s)


@dataclass(slots=True)
class RecordedTraining:
    """A run in progress: `step` makes the next one, as `trainer.fit` does."""

    folder: RunFolder
    log: RunLog
    agent: ScriptedAgent
    tasks: Sequence[Task]
    error: str = "the verifier took longer than 60 s"
    made: int = 0
    batch: Batch | None = None
    """The last step's."""

    async def step(self, **more: float) -> None:
        """`more`: metrics of one's own."""
        self.log.phase(self.made + 1, "sampling")
        groups = [
            Group(f"g{self.made}-{number}", task, await self._rollouts(task))
            for number, task in enumerate(self.tasks)
        ]
        self.made += 1
        self.log.phase(self.made, "training")
        batch = self.batch = trained_batch(groups)
        batch.prox_logprobs = batch.logprobs + DIFFERENCE
        batch.entropies = -2 * batch.logprobs
        batch.ref_logprobs = batch.logprobs
        algorithm = Algorithm(AlgorithmConfig(preset="grpo"))
        metrics = rollout_metrics(groups, success_at=1.0) | staleness_metrics(batch, 0)
        metrics |= mismatch_metrics(batch, batch.prox_logprobs, 0)
        metrics |= algorithm.compute_advantages(batch)
        # As if the algorithm had left out the first sequence.
        trained = torch.arange(1, len(batch.sequences))
        self.log.phase(self.made, "sending weights")
        self.log.step(self.made, metrics | more, groups, TokenColumns.of(batch, trained))

    async def evaluate(self, name: str) -> None:
        self.log.phase(self.made, f"evaluation {name}")
        evaluator = Evaluator(self.agent, self.tasks, EvalConfig(), concurrency=1)
        self.log.evaluation(self.made, name, await evaluator.evaluate(self.made))

    async def _rollouts(self, task: Task) -> list[Rollout]:
        kind = SessionKind.TRAIN
        made = [
            await self.agent.run(task, kind=kind, seed=seed, version=self.made) for seed in range(3)
        ]
        for rollout in made:
            self.log.trial_ended(rollout)
        failed = replace(made[0], trial_id=f"{made[0].trial_id}-failed", error=self.error)
        return [*made, replace(failed, status=RolloutStatus.FAILED, reward=None)]


def begin(path: Path, model: Path, **sections: Any) -> RunFolder:
    """A folder with the configuration of a run that has not begun."""
    folder = RunFolder.create(path)
    settings = {"model": {"path": str(model)}, "optimizer": {"lr": 1e-4}, **sections}
    replace_file(folder.config, yaml.safe_dump(settings))
    return folder


async def training(
    start_proxy: StartProxy,
    folder: RunFolder,
    *task_ids: str,
    token_bytes: int = 2**20,
    collector: str | None = None,
) -> tuple[RunningProxy, RecordedTraining]:
    """A proxy that shows the run, and the run. `collector`: where both send telemetry."""
    store = f"sqlite:///{folder.sessions}"
    proxy = await start_proxy(store=store, run=folder.path, telemetry={"endpoint": collector})
    config = LoggingConfig(tensorboard=False, progress="none", token_bytes=token_bytes)
    log = RunLog(config, folder, steps=STEPS, telemetry=collector)
    named = zip(task_ids or ("lamps", "chairs"), cycle(("shop", "street")), strict=False)
    tasks = [Task(name, {}, source=source) for name, source in named]
    return proxy, RecordedTraining(folder, log, ScriptedAgent(proxy), tasks)


def write_log(run: Path, trial: str, log: str) -> None:
    """The files of a trial's agent and verifier."""
    folder = run / "trials" / trial
    folder.mkdir(parents=True)
    (folder / "agent.log").write_bytes(log.encode(errors="surrogatepass"))
    (folder / "grader.log").write_text("answered 11, wanted 28")


async def whole(run: RecordedTraining) -> None:
    """A run from its beginning to its end."""
    await run.evaluate("before")
    for _ in range(STEPS):
        await run.step()
    await run.evaluate("after")
    run.log.finish("done")
    run.log.close()
    run.folder.unlock()
