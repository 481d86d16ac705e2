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
DENSE = Limits(0.06, 0.2)
LINEAR = Limits(0.15, 0.3)
ROUTED = Limits(0.3, 0.5)


def rounding_limits(model: ModelConfig) -> Limits:
    """The limits in bfloat16 for the kinds of layers that the checkpoint has."""
    limits = _of_layers(model.path)
    return limits[model.router_replay == "replay"]


@functools.lru_cache(maxsize=8)
def _of_layers(path: Path) -> tuple[Limits, Limits]:
    """The limits with the engine's own routing, and with replay."""
    text = load_settings(path).get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    replayed = LINEAR if "linear_attention" in kinds else DENSE
    return (ROUTED if number_of(text, EXPERTS) else replayed), replayed
