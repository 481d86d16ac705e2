"""The loop of supervised fine-tuning, without a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.records import Rollout, RolloutStatus, Task
from trainer.cluster.rank_zero import Save
from trainer.errors import CheckpointError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import Demonstration
from trainer.extras.sft.fit import HeldOutLoss, SftFit
from trainer.extras.sft.schedule import Schedule
from trainer.learning.learner import RunState
from trainer.ranks_config import TrainerSection
from trainer.run.control import RunControl


def demonstration(name: str) -> Demonstration:
    rollout = Rollout(name, Task(name, {}), RolloutStatus.DONE, None)
    return Demonstration(name, "recorded", rollout, tokens=2, trained=1)


class RankZero:
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    async def ask(self, request: Any) -> Any:
        if isinstance(request, Save):
            self.saved = request.loop
        return 0.5 if isinstance(request, HeldOutLoss) else {"sft/loss": 1.0}


class Log:
    """A run in which each step takes 10 seconds."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.wall_s = 0.0
        self.saved_step = 0
        self.folder = SimpleNamespace(path="runs/a")
        self.progress = SimpleNamespace(say=lambda _: None)

    def phase(self, step: int, name: str) -> None:
        self.wall_s += 10.0 * (name == "training")

    def step(self, step: int, metrics: dict[str, float], groups: object) -> None:
        self.steps.append(metrics)


async def held_out_steps(max_wall_s: float | None) -> tuple[int, list[int]]:
    """The number of steps, and those with a held-out loss."""
    fit, _, log = new_fit(TrainerSection(max_wall_s=max_wall_s))
    await fit.run()
    return fit.step, [n for n, each in enumerate(log.steps, 1) if "sft/held_out_loss" in each]


def new_fit(trainer: TrainerSection, **changes: Any) -> tuple[SftFit, RankZero, Log]:
    """Four sessions, one for each step; `changes` are those of the schedule."""
    log: Any = Log()
    stored: Any = SimpleNamespace(latest=lambda: None)
    ranks: Any = RankZero()
    schedule = replace(Schedule([demonstration(name) for name in "abcd"], 1, 1, 0), **changes)
    config = SftConfig(sessions=("x",), held_out_every=0)
    held_out = [demonstration("held-out")]
    fit = SftFit(config, trainer, ranks, schedule, held_out, "", stored, log, RunControl())
    return fit, ranks, log


async def test_held_out_loss_is_computed_at_the_end() -> None:
    assert await held_out_steps(None) == (4, [4])


async def test_held_out_loss_is_computed_at_the_end_of_a_run_that_ran_out_of_time() -> None:
    assert await held_out_steps(15.0) == (2, [2])


@pytest.mark.parametrize(
    "changes",
    [{"batch_sessions": 2}, {"seed": 1}, {"demonstrations": [demonstration(n) for n in "abce"]}],
)
async def test_run_whose_batches_would_be_others_does_not_continue(changes: dict[str, Any]) -> None:
    begun, ranks, _ = new_fit(TrainerSection(max_wall_s=15.0))
    await begun.run()
    state = RunState(2, 2, ranks.saved)
    longer, *_ = new_fit(TrainerSection(), epochs=2)
    longer.resume_from(state)
    await longer.run()
    assert longer.step == 8
    with pytest.raises(CheckpointError, match=r"sft\.batch_sessions, .* has changed"):
        new_fit(TrainerSection(), **changes)[0].resume_from(state)
