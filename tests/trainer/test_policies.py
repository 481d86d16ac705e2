"""One run trains two policies from the same trials, each as if it were alone."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer
from agent_loop.producers.protocol import Producer
from agent_loop.producers.sync import SyncProducer
from agent_loop.records import AgentResult, FinishedTrial, Graded, Task, Trial
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.tasks import Source, TaskStream
from agent_loop.trial.config import TrialConfig
from proxy.run_files.files import read_jsonl
from tests.agent_loop.asking_agent import AskingAgent
from tests.trainer.adapter_engine import AdapterEngine
from tests.trainer.test_fit import config_of, lines
from tests.trainer.test_two_policies import POLICIES, Parity, proxy_of
from trainer.checkpoint import Checkpoints
from trainer.cluster.engines import RunEngines
from trainer.cluster.local import local_trainer
from trainer.cluster.rank_zero import Restore
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError
from trainer.fit import Fit
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.log import RunLog

STEPS = 3
GROUP_SIZE = 4
LR = {"planner": 3e-2, "coder": 1e-2}
RANK = {"planner": 4, "coder": 2}


class Cut(BaseException):
    """Ends a run as a killed process does: nothing is saved any more."""


class OwnModelAgent:
    """An agent that asks the model of its task; it ends the run at the trial `cut_at`."""

    overhead_s = 60.0

    def __init__(self, cut_at: int | None = None) -> None:
        self._left = cut_at

    async def run(self, trial: Trial) -> AgentResult:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise Cut
        return await AskingAgent(trial.task.data["model"], max_tokens=6).run(trial)

    async def close(self) -> None:
        pass


class PlannerAndCoder:
    """An agent that asks the planner and, except in task-1, the coder in the same conversation."""

    overhead_s = 60.0

    async def run(self, trial: Trial) -> AgentResult:
        models = POLICIES[: 1 if trial.task.task_id == "task-1" else 2]
        return await AskingAgent(*models, max_tokens=6).run(trial)

    async def close(self) -> None:
        pass


class EvenTokens:
    """The reward of a trial: the share of all its sampled ids that are even."""

    async def grade(self, finished: FinishedTrial) -> Graded:
        ids = np.concatenate([turn.sampled_ids for turn in finished.turns])
        return Graded(float((ids % 2 == 0).mean()))

    async def close(self) -> None:
        pass


class OwnParity:
    """The reward of the policy that the task is for, see `Parity`."""

    async def grade(self, finished: FinishedTrial) -> Graded:
        return await Parity(finished.trial.task.data["model"]).grade(finished)

    async def close(self) -> None:
        pass


class InTurn(SyncProducer):
    """Draws tasks for the planner and for the coder in turn. With `only`, those for the other one
    are drawn as well, and not run, so that each group has the same number and seeds."""

    def __init__(self, tasks: TaskStream, only: str | None, *given: Any, **more: Any) -> None:
        self._stream, self._only = tasks, only
        super().__init__(given[0], tasks, given[1], **more)

    def start(self, version: int, state: Any = None) -> None:
        super().start(version, state)
        if self._only == POLICIES[1] and not self._stream.cursor.draws:
            self._stream.draw()

    def draw(self) -> Task:
        policy = POLICIES[self._stream.cursor.draws % 2]
        task = replace(super().draw(), data={"model": policy})
        if self._only is not None:
            self._stream.draw()
        return task


def config_for(model: Path, only: str | None, frozen: Sequence[str] = ()) -> TrainerConfig:
    """With `only`, an ordinary run of this policy; else a run of both."""
    first = only or POLICIES[0]
    own = {
        name: {"optimizer": {"lr": LR[name]}, "lora": {"rank": RANK[name]}}
        | ({"frozen": True} if name in frozen else {})
        for name in POLICIES
    }
    return config_of(
        model,
        model={"lora": {"rank": RANK[first], "update": "adapter", "policy": first}},
        optimizer={"lr": LR[first]},
        rollout={
            "groups_per_step": 1 if only or frozen else 2,
            "group_size": GROUP_SIZE,
            "seeded": True,
        },
        remote_agent={
            "command": {"argv": ["true"]},
            "policies": {} if only else {"coder": "coder"},
        },
        trainer={
            "steps": STEPS,
            "save_every": 1,
            "device": "cpu",
            "policies": {} if only else own,
        },
    )


async def train(
    config: TrainerConfig,
    folder: Path,
    only: str | None = None,
    cut_at: int | None = None,
    *,
    separate: bool = False,
) -> Counter[tuple[str, int]]:
    """Trains, from the last checkpoint in the folder if there is one. Returns the number of turns
    by the policy that sampled it, and its version."""
    run = RunFolder.create(folder) if not folder.exists() else RunFolder(folder)
    control = RunControl()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(AdapterEngine(config.model.path, 1))
        proxy = await stack.enter_async_context(proxy_of(config.model.path, engine.url, folder))
        rank_zero = await stack.enter_async_context(local_trainer(config, run, control, [5, 6, 7]))
        checkpoints = Checkpoints(run.checkpoints, keep_last=1)
        state = await rank_zero.ask(Restore(checkpoints))
        log = RunLog(config.logging, run, steps=STEPS, saved_step=state.step)
        stack.enter_context(closing(log))
        engines = RunEngines(rank_zero, given_urls=[engine.url], adapters=run.path / "adapters")
        engines.proxy = proxy
        await engines.connect()
        trials = RemoteAgentLoop(
            proxy,
            PlannerAndCoder() if separate else OwnModelAgent(cut_at),
            EvenTokens() if separate else OwnParity(),
            run.trials,
            trial=TrialConfig(sandbox="off", max_retries=0, policies=config.remote_agent.policies),
            sampling=config.rollout,
            policy=config.model.policy,
            trained=config.trained_policies,
        )
        tasks = TaskStream([Source("s", [Task(f"task-{n}", {}) for n in range(3)])], seed=1)
        seed, buffer = config.trainer.seed, ReplayBuffer(run.buffer)
        stack.callback(buffer.close)
        producer: Producer = InTurn(tasks, only, trials, config.rollout, seed=seed)
        if separate:
            producer = AsyncProducer(trials, tasks, config.rollout, seed=seed, buffer=buffer)
        stack.push_async_callback(producer.close)
        fit = Fit(
            config.trainer,
            config.eval,
            rank_zero,
            engines,
            producer,
            None,
            checkpoints,
            log,
            control,
        )
        fit.resume_from(state)
        await fit.run()
        found: Counter[tuple[str, int]] = Counter()
        for session in await proxy.list_sessions(limit=1000):
            _, turns = await proxy.get_turns(session["trial_id"])
            found.update((turn.policy, span.version) for turn in turns for span in turn.versions)
    return found


def adapter(folder: Path, policy: str | None) -> bytes:
    saved = Checkpoints(RunFolder(folder).checkpoints, keep_last=1).latest()
    assert saved is not None
    part = saved.path if policy is None else saved.path / "policies" / policy
    return (part / "adapter" / "adapter_model.safetensors").read_bytes()


def trained_metrics(folder: Path, policy: str | None) -> list[dict[str, float]]:
    """The metrics of each step that come from training, of one policy of the run."""
    prefix = "" if policy is None else f"policies/{policy}/"
    names = tuple(
        prefix + name for name in ("actor/", "advantage/", "group/", "mismatch/", "staleness/")
    )
    return [
        {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(names)}
        for line in lines(RunFolder(folder))
    ]


@pytest.fixture(scope="module")
def both(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of both policies."""
    folder = tmp_path_factory.mktemp("both") / "run"
    asyncio.run(train(config_for(tiny_model, None), folder))
    return folder


@pytest.mark.parametrize("policy", POLICIES)
def test_each_of_two_policies_of_a_run_equals_the_policy_trained_alone(
    tiny_model: Path, tmp_path: Path, both: Path, policy: str
) -> None:
    """Bit for bit, with a rank and a learning rate of its own: metrics and adapter."""
    asyncio.run(train(config_for(tiny_model, policy), tmp_path / "run", policy))
    alone = trained_metrics(tmp_path / "run", None)
    assert len(alone) == STEPS
    assert len({line["actor/grad_norm"] for line in alone}) == STEPS
    assert trained_metrics(both, policy) == alone
    assert adapter(both, policy) == adapter(tmp_path / "run", None)


def test_run_that_was_cut_continues_with_all_policies_as_if_it_had_not_been_cut(
    tiny_model: Path, tmp_path: Path, both: Path
) -> None:
    config, folder = config_for(tiny_model, None), tmp_path / "run"
    in_second_step = 2 * GROUP_SIZE + 3
    with pytest.raises(BaseExceptionGroup):
        asyncio.run(train(config, folder, cut_at=in_second_step))
    assert [line["step"] for line in lines(RunFolder(folder))] == [1]
    asyncio.run(train(config, folder))
    for policy in POLICIES:
        assert trained_metrics(folder, policy) == trained_metrics(both, policy)
        assert adapter(folder, policy) == adapter(both, policy)


def test_frozen_policy_is_served_and_never_changes(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, None, frozen=["coder"])
    sampled = asyncio.run(train(config, tmp_path / "run", "planner"))
    assert sampled == {("planner", version): GROUP_SIZE for version in range(STEPS)}
    names = {name for line in lines(RunFolder(tmp_path / "run")) for name in line}
    assert any(name.startswith("policies/planner/") for name in names)
    assert not any(name.startswith("policies/coder/") for name in names)
    engines = [each.name for each in (tmp_path / "run" / "adapters").iterdir()]
    assert len([name for name in engines if name.startswith("coder@")]) == 1


def test_checkpoint_of_other_policies_is_refused(
    tiny_model: Path, tmp_path: Path, both: Path
) -> None:
    config = config_for(tiny_model, None, frozen=["coder"])
    folder = tmp_path / "run"
    shutil.copytree(both, folder)
    with pytest.raises(CheckpointError, match=r"planner, coder, but this run trains planner;"):
        asyncio.run(train(config, folder, "planner"))


def test_policies_of_one_conversation_are_trained_while_it_is_sampled(
    tiny_model: Path, tmp_path: Path
) -> None:
    """In mode `separate`: staleness is bounded for both, and a step in which the coder sampled
    nothing trains only the planner."""
    config, folder = config_for(tiny_model, None), tmp_path / "run"
    rollout = config.rollout.model_copy(update={"groups_per_step": 1, "max_staleness": 1})
    config = config.model_copy(update={"rollout": rollout})
    sampled = asyncio.run(train(config, folder, separate=True))
    run = RunFolder(folder)
    task_of = {line["step"]: line["task_id"] for line in read_jsonl(run.trials_log)}
    assert set(task_of.values()) == {"task-0", "task-1", "task-2"}
    for line in lines(run):
        assert line["policy_version"] == line["step"]
        assert line["staleness/max"] <= 1
        assert line.get("mismatch/logp_abs_mean", 0.0) < 1e-5  # of tokens that are not stale
        trained = {policy for policy in POLICIES if f"policies/{policy}/actor/loss" in line}
        assert trained == set(POLICIES[: 1 if task_of[line["step"]] == "task-1" else 2])
    assert {policy for policy, _ in sampled} == set(POLICIES)
    assert adapter(folder, "planner") != adapter(folder, "coder")
