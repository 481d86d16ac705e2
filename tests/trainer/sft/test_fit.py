"""The loop of supervised fine-tuning, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agent_loop.records import Rollout, RolloutStatus, Task
from trainer.ranks_config import TrainerSection
from trainer.run.control import RunControl
from trainer.sft.config import SftConfig
from trainer.sft.demonstrations import Demonstration
from trainer.sft.fit import HeldOutLoss, SftFit
from trainer.sft.schedule import Schedule


def demonstration(name: str) -> Demonstration:
    rollout = Rollout(name, Task(name, {}), RolloutStatus.DONE, None)
    return Demonstration(name, "recorded", rollout, tokens=2, trained=1)


class RankZero:
    async def ask(self, request: Any) -> Any:
        return 0.5 if isinstance(request, HeldOutLoss) else {"sft/loss": 1.0}


class Log:
    """A run in which each step takes 10 seconds."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.wall_s = 0.0
        self.saved_step = 0
        self.folder = None
        self.progress = SimpleNamespace(say=lambda _: None)

    def phase(self, step: int, name: str) -> None:
        self.wall_s += 10.0 * (name == "training")

    def step(self, step: int, metrics: dict[str, float], groups: object) -> None:
        self.steps.append(metrics)


async def held_out_steps(max_wall_s: float | None) -> tuple[int, list[int]]:
    """The number of steps, and those with a held-out loss."""
    log: Any = Log()
    stored: Any = SimpleNamespace(latest=lambda: None)
    ranks: Any = RankZero()
    schedule = Schedule([demonstration(name) for name in "abcd"], 1, 1, 0)
    config = SftConfig(sessions=("x",), held_out_every=0)
    trainer = TrainerSection(max_wall_s=max_wall_s)
    held_out = [demonstration("held-out")]
    fit = SftFit(config, trainer, ranks, schedule, held_out, "", stored, log, RunControl())
    await fit.run()
    return fit.step, [n for n, each in enumerate(log.steps, 1) if "sft/held_out_loss" in each]


async def test_held_out_loss_is_computed_at_the_end() -> None:
    assert await held_out_steps(None) == (4, [4])


async def test_held_out_loss_is_computed_at_the_end_of_a_run_that_ran_out_of_time() -> None:
    assert await held_out_steps(15.0) == (2, [2])
