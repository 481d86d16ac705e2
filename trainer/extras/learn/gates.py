"""What is measured of an adapter before it serves anybody, and whether it passes.

Invariant: an adapter that a gate refuses has never answered a call, and its batch is set aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.kl import K3
from trainer.batch import Batch
from trainer.extras.learn.config import Gates
from trainer.learning import steps
from trainer.learning.learner import Learner


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The scores of one batch under one adapter."""

    logprobs: Tensor
    """`[N]`."""
    entropy: Tensor
    """`[N]`."""
    kl: Tensor
    """`[N]`, estimates (k3) of the KL divergence to the base."""


def look(learner: Learner, batch: Batch, temperature: float) -> Look:
    """Scores the batch, whose columns stay as they were."""
    kept = batch.prox_logprobs, batch.entropies
    own = steps.compute_logprobs(learner.models, batch, temperature=temperature)
    batch.prox_logprobs, batch.entropies = kept
    base = steps.base_logprobs(learner.models, batch, temperature=temperature)
    return Look(own.logprobs, own.entropy, K3().divergence(own.logprobs, base.logprobs))


@dataclass(frozen=True, slots=True)
class Measures:
    """What an update did, in nats per token.

    Example: Measures(kl=0.02, entropy=0.9, mismatch=1e-7, held_out=6, gain=0.03, loss_rise=-0.05)
    """

    kl: float
    entropy: float
    """As a share of that before."""
    mismatch: float
    held_out: int
    """Number of held-out sessions."""
    gain: float
    """0 without held-out sessions."""
    loss_rise: float
    """0 without held-out sessions of good evidence."""


def measured(
    trained: tuple[Batch, Look, Look], held_out: tuple[Batch, Look, Look] | None, parent: int
) -> Measures:
    """`trained`, `held_out`: a batch, and its scores before and after the update."""
    batch, before, after = trained
    own = batch.versions == parent
    mismatch = (before.logprobs - batch.logprobs).abs()[own]
    kl, share = [after.kl], [(before.entropy, after.entropy)]
    gain = loss_rise = 0.0
    sessions = 0
    if held_out is not None:
        test, old, new = held_out
        kl.append(new.kl)
        share.append((old.entropy, new.entropy))
        rise, sessions = new.logprobs - old.logprobs, test.num_rollouts
        gain = float(_by_rollout(test.returns * rise, test).mean())
        good = test.returns > 0
        if bool(good.any()):
            loss_rise = -float(rise[good].mean())
    entropy_before = torch.cat([first for first, _ in share]).mean()
    entropy_after = torch.cat([second for _, second in share]).mean()
    return Measures(
        kl=float(torch.cat(kl).mean()),
        entropy=float(entropy_after / entropy_before.clamp(min=1e-12)),
        mismatch=float(mismatch.mean()) if bool(own.any()) else 0.0,
        held_out=sessions,
        gain=gain,
        loss_rise=loss_rise,
    )


def refusals(found: Measures, gates: Gates) -> list[str]:
    """Why the adapter must not serve anybody; empty: it may."""
    said = []

    def bound(ok: bool, words: str) -> None:  # NaN is not ok
        if not ok:
            said.append(words)

    bound(
        found.mismatch <= gates.max_mismatch,
        f"the record's log-probabilities are not its adapter's: mean |Δ log p| {found.mismatch:.3g}"
        f" above gates.max_mismatch={gates.max_mismatch:g}",
    )
    bound(found.kl <= gates.max_kl, f"KL {found.kl:.3g} above gates.max_kl={gates.max_kl:g}")
    bound(
        found.entropy >= gates.min_entropy,
        f"entropy fell to {found.entropy:.3g} of before, below gates.min_entropy="
        f"{gates.min_entropy:g}",
    )
    if found.held_out >= gates.least_held_out:
        bound(
            found.loss_rise <= gates.max_loss_rise,
            f"good held-out answers lost {found.loss_rise:.3g} nats, above gates.max_loss_rise="
            f"{gates.max_loss_rise:g}",
        )
        bound(
            found.gain >= gates.least_gain,
            f"gain on held-out evidence {found.gain:.3g} below gates.least_gain="
            f"{gates.least_gain:g}",
        )
    return said


def as_json(found: Measures) -> Mapping[str, float | None]:
    values = {name: getattr(found, name) for name in Measures.__slots__}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _by_rollout(values: Tensor, batch: Batch) -> Tensor:
    """`[R]`: the mean of the values over the tokens of each rollout."""
    sums = torch.zeros(batch.num_rollouts).index_add(0, batch.rollout, values.float())
    return sums / batch.rollout_tokens.clamp(min=1)
