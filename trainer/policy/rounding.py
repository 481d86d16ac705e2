"""How far the log-probabilities of trainer and engine may differ, if both are right.

They compute the same model with different kernels, so each rounds in its own way. In float32 that
is less than 1e-4 for every class of docs/models.md. In bfloat16 it depends on the layers:

    dense               the trainer alone is 8e-3 to 1.4e-2 from float64 (random models of four
                        classes on an H200); trainer and engine together 1.2e-2 on a CPU
    linear attention    2.5e-2 alone on that card: the chunked rule adds up more products
    experts             rounding changes the router's choice: 2.6e-2 to 0.29 together on a CPU;
                        with `router_replay`, as dense

A limit is about four times the largest of these values for two independent roundings, because
published models have larger logits than random ones. The logits themselves are rounded, too: by up
to 0.06 between 16 and 32, of which sampled tokens, which are probable, see little, and the probe's
tokens, which are improbable, see all (4.3e-2 on the quickstart's). What the limits are for is far
beyond them: other weights, another temperature or another adapter differ by 0.3 and more.

Less than that differs what the engine computes with some keys and values of the weights before an
update: 1.4e-4 on the quickstart, whose first step differs by 5.6e-7. In float32, without experts,
whose choice a rounding can change, a run's later steps are therefore compared with its own first
one, before which no update was (`later_limit`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from trainer.policy.model_config import ModelConfig, load_settings
from trainer.policy.shrink import EXPERTS, number_of


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum mean |Δ log p|.

    Example: Limits(sampled=0.06, probe=0.2)
    """

    sampled: float
    """On tokens that were sampled from the same weights."""
    probe: float
    """On the probe, whose tokens are improbable."""


EXACT = Limits(1e-3, 1e-3)
LATER = 20.0
"""How many times the mismatch of the first step a later one may have. Measured: at most 1.5 times,
in runs of up to 27 steps whose entropy fell to a tenth."""
LEAST = 1e-5
"""The least limit of later steps: the first tokens may be certain, and so hardly differ."""
DENSE = Limits(0.06, 0.2)
LINEAR = Limits(0.15, 0.3)
ROUTED = Limits(0.3, 0.5)


def rounding_limits(model: ModelConfig) -> Limits:
    """The limits in bfloat16 for the kinds of layers that the checkpoint has."""
    limits = _of_layers(model.path)
    return limits[model.router_replay == "replay"]


def later_limit(model: ModelConfig, first: float) -> float:
    """The limit in float32 after the first step, whose mean |Δ log p| on sampled tokens is
    `first`."""
    text = load_settings(model.path).get_text_config()
    return EXACT.sampled if number_of(text, EXPERTS) else max(LEAST, LATER * first)


@functools.lru_cache(maxsize=8)
def _of_layers(path: Path) -> tuple[Limits, Limits]:
    """The limits with the engine's own routing, and with replay."""
    text = load_settings(path).get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    replayed = LINEAR if "linear_attention" in kinds else DENSE
    return (ROUTED if number_of(text, EXPERTS) else replayed), replayed
