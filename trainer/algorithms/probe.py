"""Finds settings under which nothing can be learned, and parts of your own that do not work, by a
step on an invented batch.

The batch has two answers, good and bad, of a policy that samples each of them half of the time. As
many tokens of it are good as are bad, so that a sum over the batch is the expectation over what the
policy samples: a term whose gradient is 0 here has one of 0 in expectation.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator

import torch
from torch import Tensor

from agent_loop.records import Group, Rollout, RolloutStatus, Segment, Task
from trainer.algorithms.algorithm import Algorithm
from trainer.algorithms.config import AlgorithmConfig
from trainer.algorithms.part import FunctionPart, NamedPart
from trainer.batch import Batch, build_batch

REWARDS = ((0.0, 1.0), (-1.0, 1.0), (0.0, 10.0), (0.0, 100.0), (0.0, 1e4), (1.0, 0.0), (1e-3, 0.0))
"""Rewards of the bad and the good answer that are tried: a bound or a threshold leaves some equal.
"""
MAX_GROUP = 32
"""Larger groups are tried with this many rollouts, and with a `k` that is as far from it."""
_ALMOST_0 = 1e-9


def settings_without_effect(config: AlgorithmConfig, group_size: int) -> Iterator[str]:
    """A line for each term of the loss that can train nothing; parts of your own are not tried."""
    if isinstance(config.advantage, FunctionPart) or isinstance(config.loss, FunctionPart):
        return
    if type(config.advantage).__module__ != "trainer.algorithms.advantages":
        return
    if config.advantage.name != "none" and not _rewards_teach(config, group_size):
        advantage = config.advantage.model_dump()
        reward = config.reward.model_dump(exclude_defaults=True)
        yield (
            f"algorithm: no reward can change the policy with rollout.group_size={group_size}, "
            f"advantage={advantage} and reward={reward}: every advantage is 0"
            f"{_advice(config, group_size)}"
        )
    if config.kl is not None and config.kl.where == "loss" and config.kl.coefficient:
        estimator = config.kl.estimator
        if not _moves(config, group_size, "kl"):
            yield (
                f"algorithm.kl.estimator={estimator.name} in the loss: its gradient is 0 in "
                "expectation, so that it does not hold the policy near its reference; use k2 or "
                "k3, or algorithm.kl.where=reward"
            )
    if config.distillation is not None and not _moves(config, group_size, "distillation"):
        yield (
            f"algorithm.distillation.estimator={config.distillation.estimator.name}: its gradient "
            "is 0 in expectation, so that nothing is learned from the teacher; use k2 or k3"
        )


def broken_parts(config: AlgorithmConfig, group_size: int) -> Iterator[str]:
    """A line for the first part of your own that fails on an invented batch, or whose loss has no
    finite gradient: a wrong call costs no trial. The parts of this package are not tried."""
    values = (getattr(config, name) for name in type(config).model_fields)
    own = [each for each in values if isinstance(each, NamedPart) and _is_outside(each)]
    if not own:
        return
    size = min(max(group_size, 1), MAX_GROUP)
    batch = _batch((0.0, 1.0), size // 2 or 1, size)
    what = f"on an invented batch of {batch.num_rollouts} rollouts in two groups"
    algorithm, stage = Algorithm(config), "advantage"
    try:
        algorithm.compute_advantages(batch)
        stage = "loss"
        gradient = _gradient_of(algorithm, batch)
    # What the user's code raises has no common type.
    except Exception as error:  # noqa: BLE001 (it becomes a line for the user)
        part = next((each for each in own if each is getattr(config, stage)), own[0])
        yield f"algorithm.{_key_of(config, part)}={part.name} fails {what}: {_told(error)}"
        return
    if not math.isfinite(gradient):
        yield f"algorithm.{stage}={own[0].name}: its gradient {what} is {gradient}"


def _is_outside(part: NamedPart) -> bool:
    return isinstance(part, FunctionPart) or not type(part).__module__.startswith("trainer.")


def _key_of(config: AlgorithmConfig, part: NamedPart) -> str:
    return next(name for name in type(config).model_fields if getattr(config, name) is part)


def _told(error: Exception) -> str:
    """The error with the place where it was raised. Example: "KeyError: 'x' (advantages.py:12)" """
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{' '.join(text.split())[:300]} ({last.filename}:{last.lineno})"


def _advice(config: AlgorithmConfig, group_size: int) -> str:
    if config.reward.scale == 0:
        return "; use another algorithm.reward.scale than 0"
    if config.advantage.name == "pass_at_k":
        return f"; use algorithm.advantage.k below rollout.group_size={group_size}"
    return "; use another advantage, or other bounds of algorithm.reward"


def _rewards_teach(config: AlgorithmConfig, group_size: int) -> bool:
    alone = config.model_copy(update={"kl": None, "distillation": None, "entropy_coefficient": 0.0})
    threshold = getattr(config.advantage, "threshold", None)
    tried = REWARDS if threshold is None else (*REWARDS, (threshold - 1, threshold + 1))
    size = min(group_size, MAX_GROUP)
    return any(
        abs(_gradient(alone, _batch(rewards, good, size))) > _ALMOST_0
        for rewards in tried
        for good in {1, size // 2 or 1, size - 1 or 1}
    )


def _moves(config: AlgorithmConfig, group_size: int, term: str) -> bool:
    """Whether this term alone has a gradient in expectation, without rewards."""
    others = {"kl": None, "distillation": None} | {term: getattr(config, term)}
    # Rewards are equal, and groups without a signal would not be trained.
    alone = config.model_copy(update={**others, "groups": "all", "entropy_coefficient": 0.0})
    size = min(max(group_size, 2), MAX_GROUP)
    return abs(_gradient(alone, _batch((0.0, 0.0), size // 2, size))) > _ALMOST_0


def _batch(rewards: tuple[float, float], good: int, size: int) -> Batch:
    """Two groups of rollouts of one token, 1 if good and 0 if bad: `good` of the first group are,
    and as many of the second as make half of all."""
    groups = []
    for number, count in enumerate((good, size - good)):
        rollouts = tuple(_rollout(f"{number}-{n}", n < count, rewards) for n in range(size))
        groups.append(Group(str(number), Task(str(number), {}), rollouts))
    batch = build_batch(groups)
    batch.prox_logprobs = batch.logprobs.clone()
    batch.values = torch.zeros(batch.num_tokens)
    batch.ref_logprobs = torch.where(batch.ids == 1, math.log(0.8), math.log(0.2))
    batch.teacher_logprobs = batch.ref_logprobs
    return batch


def _rollout(trial: str, is_good: bool, rewards: tuple[float, float]) -> Rollout:
    ids, zeros = torch.tensor([0, int(is_good)]).numpy(), torch.zeros(2, dtype=torch.int32).numpy()
    mask = torch.tensor([False, True]).numpy()
    logprobs = torch.full((2,), math.log(0.5)).numpy()
    segment = Segment(-1, ids, mask, logprobs, zeros, zeros)
    reward = rewards[is_good]
    return Rollout(
        trial, Task("t", {}), RolloutStatus.DONE, reward, (segment,), turn_returns={0: reward}
    )


def _gradient(config: AlgorithmConfig, batch: Batch) -> float:
    """The derivative of the loss by the logit of the good answer."""
    algorithm = Algorithm(config)
    algorithm.compute_advantages(batch)
    return _gradient_of(algorithm, batch)


def _gradient_of(algorithm: Algorithm, batch: Batch) -> float:
    """The same of a batch that has its advantages."""
    trained = algorithm.trained_sequences(batch)
    if not len(trained):
        return 0.0
    logit = torch.zeros((), requires_grad=True)
    good = torch.nn.functional.logsigmoid(logit)
    bad = torch.nn.functional.logsigmoid(-logit)
    logprobs: Tensor = torch.where(batch.ids == 1, good, bad)
    entropy = torch.full_like(logprobs, math.log(2)).detach()
    targets = torch.arange(batch.num_tokens)
    loss = algorithm.loss(batch, algorithm.weigh(batch))(logprobs, entropy, targets)
    (derivative,) = torch.autograd.grad(loss.losses.double().sum(), logit)
    return float(derivative)
