"""Refuses models whose forward pass the trainer cannot compute exactly, naming the reason.

Invariant: a model in training gives tokens the same scores as the model's own code. What a
configuration declares is checked from the configuration alone (`check_settings`). What is visible
only when the model runs (an unknown argument of attention, a transformation of the logits, noise
inside a function) is checked when the model is loaded, by scoring a few tokens in both ways
(`check_scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer.errors import ConfigError
from trainer.packing import Layout, MicroBatch

ATTENTION = "packed_paths"
"""The name under which packed attention is registered with transformers."""
PROBE_TOKENS = 8
TOLERANCE_NATS = 1e-2
"""Maximum difference of a log-probability in float32. Rounding is below 1e-3; the smallest known
error of an architecture, a router jitter of 1 %, is above 1e-2."""
LOW_PRECISION_TOLERANCE_NATS = 0.5
"""The same for weights in bfloat16, whose rounding errors reach about 0.1."""

_LOGIT_SETTINGS = (
    *("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"),
    "lm_head_multiplier",
)

Score = Callable[[MicroBatch, Tensor], Tensor]
"""`(micro-batch, ids [M]) → log-probabilities [M]`."""


def check_settings(settings: Any, path: Path, key: str) -> None:
    """Checks that packing can compute everything that the `config.json` declares.

    Raises ConfigError, which names `key`, the checkpoint and the setting.
    """
    text = settings.get_text_config()
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise ConfigError(
            f"{key}: {path}: layers of type {strange} cannot be packed exactly; "
            "use a model whose layers are attention"
        )
    for name in _LOGIT_SETTINGS:
        if (value := getattr(text, name, None)) not in (None, 1, 1.0):
            raise ConfigError(
                f"{key}: {path}: {name}={value} is not computed in training; use another model"
            )
    for name in ("num_attention_heads", "max_position_embeddings", "vocab_size"):
        if getattr(text, name, None) is None:
            raise ConfigError(
                f"{key}: {path}: {settings.model_type} models are not supported; use another model"
            )
    mapping = AutoModelForCausalLM._model_mapping
    model_class = mapping.get(type(settings), None)
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ConfigError(
            f"{key}: {path}: models of type {settings.model_type} have an attention of their own,"
            " which does not support packing; use a model with transformers' attention interface"
        )


def without_noise(settings: Any) -> Any:
    """The settings with every dropout and jitter at 0, so that training computes the same as
    sampling."""
    for part in {id(part): part for part in (settings, settings.get_text_config())}.values():
        for name, value in vars(part).items():
            noisy = any(word in name for word in ("drop", "jitter"))
            if noisy and isinstance(value, float):
                setattr(part, name, 0.0)
    return settings


def check_model(model: Any, path: Path) -> None:
    """Checks that the trainer can compute the model's layers and its output layer.

    Raises ConfigError, which names the checkpoint and the part.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    kind = type(model).__name__
    if decoder is None or not hasattr(decoder, "layers"):
        raise ConfigError(
            f"model.path: {path}: {kind} has no list of decoder layers; use another model"
        )
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"model.path: {path}: the output layer of {kind} has a bias, which is not computed in"
            " training; use another model"
        )


@torch.no_grad()
def check_scores(model: Any, path: Path, score: Score) -> None:
    """Compares `score`, in training mode, with the model's own forward pass and attention.

    Two copies of a few tokens are packed into one row, so that errors in positions or attention
    across sequences are found, too. Raises ConfigError if a log-probability differs.
    """
    kind = type(model).__name__
    ids = torch.arange(1, PROBE_TOKENS + 1) * 7 % model.config.get_text_config().vocab_size
    try:
        model.set_attn_implementation("eager")
        logits = model.eval()(ids[None]).logits[0, :-1].float()
        model.set_attn_implementation(ATTENTION)
        model.train()
        ours = [score(_packed_twice(ids), ids[1:].repeat(2)).float() for _ in range(2)]
    except (AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.path: {path}: {kind} cannot be computed packed: {reason}; use another model"
        ) from error
    expected = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].repeat(2)
    exact = next(model.parameters()).dtype == torch.float32
    tolerance = TOLERANCE_NATS if exact else LOW_PRECISION_TOLERANCE_NATS
    if not torch.allclose(ours[0], ours[1], rtol=0, atol=tolerance / 100):
        raise ConfigError(
            f"model.path: {path}: {kind} gives other probabilities each time that it trains"
            " (dropout or router jitter in its code); set that to 0 in config.json"
        )
    worst = float((ours[0] - expected).abs().max())
    if not worst <= tolerance:
        raise ConfigError(
            f"model.path: {path}: the trainer's log-probabilities of {kind} differ from its own by"
            f" {worst:.2g} nats, at most {tolerance:g} is expected; its architecture is not"
            " supported, use another model"
        )


def _packed_twice(ids: Tensor) -> MicroBatch:
    count = len(ids)
    ends = torch.tensor([count, 2 * count]).repeat_interleave(count)
    predictors = torch.cat([torch.arange(count - 1), count + torch.arange(count - 1)])
    return MicroBatch(
        ids=ids.repeat(2),
        positions=torch.arange(count).repeat(2),
        layout=Layout(ends, count),
        targets=torch.arange(len(predictors)),
        predictors=predictors,
    )
