"""Losses and gradients compared with TRL 1.16 and verl 0.9.1 on the same padded batch.

verl is installed without its dependencies and imported without its package initialisation, so that
its functions run unchanged and do not need Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.needs import needs
from tests.trainer.algorithms.test_advantages import returns_of
from trainer.algorithms.advantages import DrGrpo, Gae, Grpo, Opo, Rloo
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.correction import Divergence, Mask, Truncate
from trainer.algorithms.kl import ESTIMATORS, K3
from trainer.algorithms.policy_losses import Cispo, Gspo, Loss, Ppo, Reinforce, Sapo
from trainer.algorithms.value_losses import CriticConfig

MISSING = [name for name in ("trl", "verl") if importlib.util.find_spec(name) is None]
pytestmark = needs(
    f"not installed: {' and '.join(MISSING)}; python -m benchmarks.install reference"
    if MISSING
    else None
)
SEEDS = range(5)
STUBS = ("ray", "ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")


@dataclass
class Padded:
    """A batch in TRL's and verl's layout `[B, T]`; `flat` converts it to this project's columns."""

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

    def total(self, losses: Tensor, aggregation: str) -> Tensor:
        """The loss that this project's per-token losses `[N]` are aggregated to."""
        norm = {"max_tokens": 9} if aggregation == "sequence_mean_token_sum_norm" else {}
        part = AGGREGATIONS.parse({"name": aggregation} | norm)
        weights = part.weights(self.sequence, self.sequence)
        return (losses * weights.double()).sum()

    def same(self, mine: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(mine.double(), theirs.double(), atol=1e-6, rtol=1e-6)
        gradients = [torch.autograd.grad(loss, self.logp)[0] for loss in (mine, theirs)]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def verl() -> Any:
    """verl's `core_algos`, and its rollout correction as `.correction`."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    package = types.ModuleType("verl")
    package.__path__ = [str(Path(spec.origin).parent)]
    sys.modules["verl"] = package
    stubbed = [name for name in STUBS if name not in sys.modules]
    sys.modules.update({name: MagicMock() for name in stubbed})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
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


VERL_LOSSES: dict[str, tuple[str, Loss]] = {
    "compute_policy_loss_vanilla": (
        "token-mean",
        Ppo(clip_low=0.2, clip_high=0.28, dual_clip=1.5),
    ),
    "compute_policy_loss_gspo": (
        "seq-mean-token-mean",
        Gspo(clip_low=0.2, clip_high=0.28),
    ),
    "compute_policy_loss_cispo": (
        "token-mean",
        Cispo(clip_low=0.2, clip_high=0.28),
    ),
    "compute_policy_loss_sapo": (
        "seq-mean-token-mean",
        Sapo(tau_positive=1.0, tau_negative=1.3),
    ),
    "compute_policy_loss_gpg": ("token-mean", Reinforce()),
}
VERL_MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", VERL_LOSSES)
def test_policy_losses_match_verl(verl: Any, name: str, seed: int) -> None:
    data = Padded.random(seed)
    mode, loss = VERL_LOSSES[name]
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
    logp, old, adv = (data.flat(x) for x in (data.logp, data.old, data.adv))
    log_w = data.flat(data.old - data.behaviour)
    weights = Truncate(upper=1.2).weights(log_w, data.sequence)
    mine = loss.losses(logp, old, adv, data.sequence).losses * weights
    data.same(data.total(mine, VERL_MODES[mode]), theirs)


@pytest.mark.parametrize("mode", VERL_MODES)
def test_aggregations_match_verl(verl: Any, mode: str) -> None:
    data = Padded.random(0)
    theirs = verl.agg_loss(data.logp, data.mask, mode)
    data.same(data.total(data.flat(data.logp), VERL_MODES[mode]), theirs)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_estimators_match_verl(verl: Any, kind: Any) -> None:
    data = Padded.random(1)
    data.same(
        ESTIMATORS.parse(kind).divergence(data.logp, data.old).sum(),
        verl.kl_penalty(data.logp, data.old, kind).sum(),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_outcome_advantages_match_verl(verl: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    rewards = torch.as_tensor(rng.choice([0.0, 0.5, 1.0], 8))
    mask = torch.as_tensor(rng.random((8, 6)) < 0.7).double()
    mask[:, 0] = 1
    scores = torch.zeros(8, 6, dtype=torch.float64)
    scores[:, 0] = rewards
    returns = returns_of(rewards.numpy(), group, mask.sum(-1).int().numpy())
    first = np.flatnonzero(np.diff(returns.rollout.numpy(), prepend=-1))  # a token of each rollout
    parts = {
        "compute_grpo_outcome_advantage": Grpo(),
        "compute_rloo_outcome_advantage": Rloo(),
        "compute_opo_outcome_advantage": Opo(),
    }
    for name, part in parts.items():
        theirs = getattr(verl, name)(scores.clone(), mask, group)[0][:, 0]
        mine = part.estimate(returns).advantages[first]
        torch.testing.assert_close(mine, theirs, atol=5e-6, rtol=1e-6, msg=name)
    mine = DrGrpo().estimate(returns).advantages[first]
    theirs = verl.compute_grpo_outcome_advantage(
        scores.clone(), mask, group, norm_adv_by_std_in_grpo=False
    )[0][:, 0]
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae_and_value_loss_match_verl(verl: Any, seed: int) -> None:
    data = Padded.random(seed, sequence_advantages=False)
    rewards, values = data.adv * data.mask, data.old
    returns = verl.compute_gae_advantage_return(rewards, values, data.mask, 0.97, 0.9)[1]
    flat_values = data.flat(values)
    gae = Gae(gamma=0.97, lam=0.9)
    _, targets = gae.by_token(data.flat(rewards), flat_values, data.sequence)
    torch.testing.assert_close(targets, data.flat(returns))
    theirs = verl.compute_value_loss(data.logp, returns, values, data.mask, 0.2)[0]
    mine = CriticConfig(clip=0.2).losses(data.flat(data.logp), flat_values, targets).losses
    data.same(data.total(mine, "token_mean"), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_rollout_correction_matches_verl(verl: Any, seed: int) -> None:
    data = Padded.random(seed)
    log_w = data.old - data.behaviour
    flat = data.flat(log_w)
    for level in ("token", "sequence"):
        weigh = verl.correction.compute_rollout_correction_weights
        theirs = data.flat(weigh(log_w, data.mask, level, 1.3)[0])
        mine = Truncate(level=level, upper=1.3).weights(flat, data.sequence)
        torch.testing.assert_close(mine, theirs)
        theirs = data.flat(weigh(log_w, data.mask, level, "0.2_5.0")[0])
        mine = Mask(level=level, lower=0.2, upper=5.0).weights(flat, data.sequence)
        torch.testing.assert_close(mine, theirs)
    scopes = {"token": "token", "seq_sum": "sequence_sum", "seq_mean": "sequence_mean"}
    for prefix, scope in scopes.items():
        for kind in ("k1", "k2", "k3"):
            lower, upper = (-0.1, 0.2) if kind == "k1" else (None, 0.05)
            spec = f"{np.exp(-0.1)}_{np.exp(0.2)}" if kind == "k1" else str(upper)
            reject = verl.correction.compute_rollout_rejection_mask
            theirs = data.flat(reject(log_w, data.mask, f"{prefix}_{kind}", spec)[0])
            part = Divergence.model_validate(
                {"estimator": kind, "scope": scope, "lower": lower, "upper": upper}
            )
            mine_kept = part.keeps(flat, data.sequence)
            assert torch.equal(mine_kept, theirs.bool()), (prefix, kind)


TRL_LOSSES: dict[str, tuple[str, str, Loss]] = {
    "grpo": (
        "token",
        "sequence_mean_token_mean",
        Ppo(clip_low=0.2, clip_high=0.28),
    ),
    "dr_grpo": (
        "token",
        "sequence_mean_token_sum_norm",
        Ppo(clip_low=0.2, clip_high=0.28),
    ),
    "dapo": (
        "token",
        "token_mean",
        Ppo(clip_low=0.2, clip_high=0.28),
    ),
    "grpo-sequence": (
        "sequence",
        "sequence_mean_token_mean",
        Gspo(clip_low=0.2, clip_high=0.28),
    ),
    "cispo": (
        "token",
        "token_mean",
        Cispo(clip_low=1.0, clip_high=0.28),
    ),
    "sapo": (
        "token",
        "sequence_mean_token_mean",
        Sapo(tau_positive=1.0, tau_negative=1.3),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TRL_LOSSES)
def test_losses_match_trl(name: str, seed: int) -> None:
    """The loss includes k3 to a reference with β = 0.04, as in TRL."""
    data = Padded.random(seed)
    level, aggregation, loss = TRL_LOSSES[name]
    loss_type = name.split("-")[0]
    logp, old, adv = (data.flat(x) for x in (data.logp, data.old, data.adv))
    kl = K3().divergence(logp, data.flat(data.behaviour))
    mine = loss.losses(logp, old, adv, data.sequence).losses + 0.04 * kl
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
