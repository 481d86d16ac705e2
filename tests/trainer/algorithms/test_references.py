"""Our functions beside TRL 1.16's and verl 0.9.1's on the same padded batch: loss and gradient.

verl is installed without its dependencies and imported without its package's start-up, so that its
functions run as they are, but without Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.algorithms import advantages, correction
from trainer.algorithms import policy_losses as ours
from trainer.algorithms.aggregation import Aggregation, token_weights
from trainer.algorithms.kl import divergence
from trainer.algorithms.value_losses import clipped_value_loss

SEEDS = range(5)
STUBS = ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")


@dataclass
class Padded:
    """`[B, T]` as TRL and verl have it; `flat` gives our columns."""

    logp: Tensor
    old: Tensor
    behaviour: Tensor
    adv: Tensor
    mask: Tensor

    @classmethod
    def random(cls, seed: int, *, sequence_advantages: bool = True) -> Padded:
        rng = torch.Generator().manual_seed(seed)
        shape = (6, 9)

        def normal(scale: float) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64) * scale

        mask = (torch.rand(shape, generator=rng) < 0.6).double()
        mask[:, 2] = 1
        old = normal(1) - 3
        adv = torch.randn(6, 1, generator=rng, dtype=torch.float64).expand(shape)
        logp = (old + normal(0.3)).requires_grad_()
        return cls(logp, old, old + normal(0.3), adv if sequence_advantages else normal(1), mask)

    def flat(self, values: Tensor) -> Tensor:
        return values[self.mask.bool()]

    @property
    def sequence(self) -> Tensor:
        return self.mask.nonzero()[:, 0]

    def total(self, losses: Tensor, aggregation: Aggregation) -> Tensor:
        """Our per-token losses `[N]` as a loss."""
        weights = token_weights(aggregation, self.sequence, self.sequence, max_tokens=9)
        return (losses * weights.double()).sum()

    def same(self, mine: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(mine.double(), theirs.double(), atol=1e-6, rtol=1e-6)
        gradients = [torch.autograd.grad(loss, self.logp)[0] for loss in (mine, theirs)]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def verl() -> Any:
    """verl's `core_algos`, and its rollout correction as `.correction`."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None, "install it: pip install --no-deps verl==0.9.1"
    assert spec.origin is not None
    package = types.ModuleType("verl")
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["verl"] = package
    stubbed = [name for name in STUBS if name not in sys.modules]
    sys.modules.update({name: MagicMock() for name in stubbed})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        core.correction = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    for name in [n for n in sys.modules if n in stubbed or n.split(".")[0] == "verl"]:
        del sys.modules[name]
    return core


def actor_config(verl: Any, **changes: Any) -> Any:
    values = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "ppo_micro_batch_size_per_gpu": 1,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 1.5,
        "tau_pos": 1.0,
        "tau_neg": 1.3,
    }
    return verl.ActorConfig(**(values | changes))


VERL_LOSSES: dict[str, tuple[str, Callable[..., ours.PolicyLoss]]] = {
    "compute_policy_loss_vanilla": (
        "token-mean",
        lambda lp, px, a, _: ours.ppo(lp, px, a, clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    ),
    "compute_policy_loss_gspo": (
        "seq-mean-token-mean",
        lambda lp, px, a, s: ours.gspo(lp, px, a, s, clip_low=0.2, clip_high=0.28),
    ),
    "compute_policy_loss_cispo": (
        "token-mean",
        lambda lp, px, a, _: ours.cispo(lp, px, a, clip_low=0.2, clip_high=0.28),
    ),
    "compute_policy_loss_sapo": (
        "seq-mean-token-mean",
        lambda lp, px, a, _: ours.sapo(lp, px, a, tau_positive=1.0, tau_negative=1.3),
    ),
    "compute_policy_loss_gpg": ("token-mean", lambda lp, _px, a, _s: ours.reinforce(lp, a)),
}
AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", VERL_LOSSES)
def test_policy_losses_are_verls(verl: Any, name: str, seed: int) -> None:
    data = Padded.random(seed)
    mode, function = VERL_LOSSES[name]
    w = torch.exp(data.old - data.behaviour).clamp(max=1.2)
    theirs = getattr(verl, name)(
        data.old,
        data.logp,
        data.adv,
        data.mask,
        loss_agg_mode=mode,
        config=actor_config(verl),
        rollout_is_weights=w,
    )[0]
    flat = [data.flat(x) for x in (data.logp, data.old, data.adv)]
    log_w = data.flat(data.old - data.behaviour)
    weights = correction.truncated(correction.importance(log_w, data.sequence, "token"), upper=1.2)
    mine = function(*flat, data.sequence).losses * weights
    data.same(data.total(mine, AGGREGATIONS[mode]), theirs)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_aggregations_are_verls(verl: Any, mode: str) -> None:
    data = Padded.random(0)
    theirs = verl.agg_loss(data.logp, data.mask, mode)
    data.same(data.total(data.flat(data.logp), AGGREGATIONS[mode]), theirs)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_divergences_are_verls(verl: Any, kind: Any) -> None:
    data = Padded.random(1)
    data.same(
        divergence(data.logp, data.old, kind).sum(),
        verl.kl_penalty(data.logp, data.old, kind).sum(),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_outcome_advantages_are_verls(verl: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    rewards = torch.as_tensor(rng.choice([0.0, 0.5, 1.0], 8))
    mask = torch.as_tensor(rng.random((8, 6)) < 0.7).double()
    mask[:, 0] = 1
    scores = torch.zeros(8, 6, dtype=torch.float64)
    scores[:, 0] = rewards
    index, tokens = torch.as_tensor(group), mask.sum(-1)
    pairs = {
        "compute_grpo_outcome_advantage": advantages.grpo(rewards, index, eps=1e-6),
        "compute_rloo_outcome_advantage": advantages.rloo(rewards, index),
        "compute_opo_outcome_advantage": advantages.opo(rewards, index, tokens),
    }
    for name, (mean, scale) in pairs.items():
        theirs = getattr(verl, name)(scores.clone(), mask, group)[0][:, 0]
        torch.testing.assert_close((rewards - mean) * scale, theirs, atol=1e-6, rtol=1e-6, msg=name)
    mean, _ = advantages.dr_grpo(rewards, index)
    theirs = verl.compute_grpo_outcome_advantage(
        scores.clone(), mask, group, norm_adv_by_std_in_grpo=False
    )[0][:, 0]
    torch.testing.assert_close(rewards - mean, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_the_value_loss_are_verls(verl: Any, seed: int) -> None:
    data = Padded.random(seed, sequence_advantages=False)
    rewards, values = data.adv * data.mask, data.old
    returns = verl.compute_gae_advantage_return(rewards, values, data.mask, 0.97, 0.9)[1]
    flat_values = data.flat(values)
    _, targets = advantages.gae(data.flat(rewards), flat_values, data.sequence, gamma=0.97, lam=0.9)
    torch.testing.assert_close(targets, data.flat(returns))
    theirs = verl.compute_value_loss(data.logp, returns, values, data.mask, 0.2)[0]
    mine = clipped_value_loss(data.flat(data.logp), flat_values, targets, clip=0.2).losses
    data.same(data.total(mine, "token_mean"), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_rollout_correction_is_verls(verl: Any, seed: int) -> None:
    data = Padded.random(seed)
    log_w = data.old - data.behaviour
    flat = data.flat(log_w)
    for level in ("token", "sequence"):
        w = correction.importance(flat, data.sequence, level)
        weigh = verl.correction.compute_rollout_correction_weights
        theirs = data.flat(weigh(log_w, data.mask, level, 1.3)[0])
        torch.testing.assert_close(correction.truncated(w, upper=1.3), theirs)
        theirs = data.flat(weigh(log_w, data.mask, level, "0.2_5.0")[0])
        torch.testing.assert_close(correction.masked(w, lower=0.2, upper=5.0), theirs)
    scopes = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean"}
    for prefix, scope in scopes.items():
        for kind in ("k1", "k2", "k3"):
            lower, upper = (-0.1, 0.2) if kind == "k1" else (None, 0.05)
            spec = f"{np.exp(-0.1)}_{np.exp(0.2)}" if kind == "k1" else str(upper)
            reject = verl.correction.compute_rollout_rejection_mask
            theirs = data.flat(reject(log_w, data.mask, f"{prefix}_{kind}", spec)[0])
            mine = correction.within(
                flat,
                data.sequence,
                estimator=kind,  # type: ignore[arg-type]
                scope=scope,  # type: ignore[arg-type]
                lower=lower,
                upper=upper,
            )
            assert torch.equal(mine, theirs.bool()), (prefix, kind)


TRL_LOSSES: dict[str, tuple[str, Aggregation, Callable[..., ours.PolicyLoss]]] = {
    "grpo": (
        "token",
        "sequence_mean_token_mean",
        lambda lp, px, a, _: ours.ppo(lp, px, a, clip_low=0.2, clip_high=0.28),
    ),
    "dr_grpo": (
        "token",
        "sequence_mean_token_sum_norm",
        lambda lp, px, a, _: ours.ppo(lp, px, a, clip_low=0.2, clip_high=0.28),
    ),
    "dapo": (
        "token",
        "token_mean",
        lambda lp, px, a, _: ours.ppo(lp, px, a, clip_low=0.2, clip_high=0.28),
    ),
    "grpo-sequence": (
        "sequence",
        "sequence_mean_token_mean",
        lambda lp, px, a, s: ours.gspo(lp, px, a, s, clip_low=0.2, clip_high=0.28),
    ),
    "cispo": (
        "token",
        "token_mean",
        lambda lp, px, a, _: ours.cispo(lp, px, a, clip_low=1.0, clip_high=0.28),
    ),
    "sapo": (
        "token",
        "sequence_mean_token_mean",
        lambda lp, px, a, _: ours.sapo(lp, px, a, tau_positive=1.0, tau_negative=1.3),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TRL_LOSSES)
def test_losses_are_trls(name: str, seed: int) -> None:
    """With k3 to a reference at β = 0.04, as TRL adds it."""
    data = Padded.random(seed)
    level, aggregation, function = TRL_LOSSES[name]
    loss_type = name.split("-")[0]
    flat = [data.flat(x) for x in (data.logp, data.old, data.adv)]
    kl = divergence(flat[0], data.flat(data.behaviour), "k3")
    mine = function(*flat, data.sequence).losses + 0.04 * kl
    theirs = trl_loss(data, loss_type, level)
    data.same(data.total(mine, aggregation), theirs)


def trl_loss(data: Padded, loss_type: str, level: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_class = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (data.logp, data.logp.detach(), None)
    trainer.accelerator.gather.side_effect = lambda x: x
    trainer.accelerator.num_processes = 1
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer.args.sapo_temperature_pos = torch.tensor(1.0, dtype=torch.float64)
    trainer.args.sapo_temperature_neg = torch.tensor(1.3, dtype=torch.float64)
    trainer.args.delta = None
    trainer.args.use_bias_correction_kl = False
    trainer.args.steps_per_generation = 1
    settings = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": level,
        "beta": 0.04,
        "loss_type": loss_type,
        "epsilon_low": 0.2,
        # TRL's CISPO clips at ε_high itself, the paper at 1 + ε_high
        "epsilon_high": 1.28 if loss_type == "cispo" else 0.28,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 9,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
    }
    trainer.configure_mock(**settings)
    ids = torch.zeros(6, 9, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": data.mask,
        "advantages": data.adv[:, 0],
        "old_per_token_logps": data.old,
        "ref_per_token_logps": data.behaviour,
        "num_items_in_batch": data.mask.sum(),
    }
    loss: Tensor = trainer_class._compute_loss(trainer, None, inputs)
    return loss
