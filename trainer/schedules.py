"""Finds schedules that contradict each other, or the length of the run, by rule: what a schedule
does at a later step is not seen on an invented batch (`trainer.algorithms.probe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_loop.evaluator import EvalConfig
from agent_loop.producers.rollout_config import RolloutConfig
from trainer.algorithms.config import AlgorithmConfig
from trainer.optimizer_config import OptimizerConfig
from trainer.ranks_config import TrainerSection

TRIAL_STEPS = 4
"""A run of at most this many steps tries a set-up, and learns nothing worth keeping: that it ends
within a schedule is a warning."""
CRITIC = "algorithm.critic.optimizer"


def rates_that_never_fall(optimizers: Mapping[str, OptimizerConfig]) -> Iterator[str]:
    """A line for each optimizer that has a last learning rate and a constant one. `optimizers`: by
    their keys."""
    for key, optimizer in optimizers.items():
        if optimizer.min_lr_ratio and optimizer.schedule == "constant":
            yield (
                f"{key}.min_lr_ratio={optimizer.min_lr_ratio:g} with {key}.schedule=constant: the "
                f"learning rate never falls; remove {key}.min_lr_ratio, or set {key}.schedule to "
                "linear or cosine"
            )


def without_effect(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, trainer: TrainerSection, evals: EvalConfig
) -> Iterator[str]:
    """A line for each schedule that has no effect in a run of any length."""
    kl = algorithm.kl
    if kl is not None and kl.adaptive is not None and not kl.coefficient:
        yield (
            "algorithm.kl.adaptive with algorithm.kl.coefficient=0: it multiplies the coefficient, "
            "which stays 0; set algorithm.kl.coefficient above 0, or remove algorithm.kl"
        )
    if rollout.tail_groups and rollout.stale == "mask" and rollout.partial_rollout:
        yield (
            f"rollout.tail_groups={rollout.tail_groups} with rollout.stale=mask: no group is "
            "cancelled for its age, so that none is collected; remove rollout.tail_groups, or set "
            "rollout.stale=drop"
        )
    if trainer.stop_at_success is not None and not evals.every:
        yield (
            f"trainer.stop_at_success={trainer.stop_at_success:g} with eval.every=0: no evaluation "
            "between the steps is compared with it; set eval.every, or remove "
            "trainer.stop_at_success"
        )


def longer_than_the_run(
    algorithm: AlgorithmConfig,
    optimizers: Mapping[str, OptimizerConfig],
    trainer: TrainerSection,
    evals: EvalConfig,
) -> Iterator[str]:
    """A line for each schedule that `trainer.steps` do not come to the end of, with the numbers
    that fit."""
    steps, critic = trainer.steps, algorithm.critic
    first = 0 if critic is None else critic.warmup_steps
    if first >= steps:
        yield (
            f"algorithm.critic.warmup_steps={first}: the policy is never trained in trainer.steps="
            f"{steps}; lower algorithm.critic.warmup_steps to at most {steps - 1}, or raise "
            f"trainer.steps to at least {first + 1}"
        )
    per_step = algorithm.epochs * algorithm.mini_batches
    for key, optimizer in optimizers.items():
        waited = 0 if key == CRITIC else first
        total = max(0, steps - waited) * per_step
        if total and (fault := warmup_beyond(key, optimizer, total)):
            needed = waited + -(-(optimizer.warmup_steps + _after(optimizer)) // per_step)
            yield f"{fault}, or raise trainer.steps={steps} to at least {needed}"
    if trainer.stop_at_success is not None and evals.every >= steps:
        yield (
            f"eval.every={evals.every}: no evaluation before the end of trainer.steps={steps} is "
            f"compared with trainer.stop_at_success; lower eval.every to at most "
            f"{max(steps - 1, 1)}, or raise trainer.steps to at least {evals.every + 1}"
        )


def warmup_beyond(key: str, optimizer: OptimizerConfig, total: int) -> str | None:
    """What is wrong with a warm-up that leaves none of `total` optimizer steps at the peak, or none
    at which a rate that falls has fallen; None: nothing is."""
    warmup, after = optimizer.warmup_steps, _after(optimizer)
    if not warmup or total >= warmup + after:
        return None
    what = "reach its peak" if after == 1 else f"fall by {key}.schedule={optimizer.schedule}"
    return (
        f"{key}.warmup_steps={warmup}: the learning rate does not {what} within the run's {total} "
        f"optimizer steps; lower {key}.warmup_steps to at most {max(total - after, 0)}"
    )


def _after(optimizer: OptimizerConfig) -> int:
    """Number of steps that a warm-up must leave: one at the peak, and one at the end of a fall."""
    return 1 if optimizer.schedule == "constant" else 2
