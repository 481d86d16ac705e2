"""Refuses models whose configuration excludes exact training, naming the setting.

Differences that are visible only when the model runs are found by `proof.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers

from trainer.errors import ConfigError
from trainer.policy.towers import READERS

_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Kinds of layers (`layer_types`) that can be computed over packed rows."""
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of positions that depend on the longest sequence of a pass: packing would change them."""


def check_settings(settings: Any, path: Path, key: str) -> None:
    """Checks that packing can compute everything that the `config.json` declares.

    Raises ConfigError, which names `key`, the checkpoint and the setting.
    """
    text = settings.get_text_config()
    kinds: Sequence[str] = getattr(text, "layer_types", None) or ()
    strange = sorted(set(kinds) - _LAYERS)
    if strange:
        raise ConfigError(
            f"{key}: {path}: layers of type {strange} cannot be packed exactly; "
            f"use a model whose layers are {' or '.join(sorted(_LAYERS))}"
        )
    for name in ("num_attention_heads", "max_position_embeddings", "vocab_size"):
        if getattr(text, name, None) is None:
            raise ConfigError(
                f"{key}: {path}: {settings.model_type} models are not supported; use another model"
            )
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        original = rope.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if rope["rope_type"] in _ROPE_BY_LENGTH and original != text.max_position_embeddings:
            raise ConfigError(
                f"{key}: {path}: rope_type={rope['rope_type']} makes positions depend on the"
                " longest sequence of a pass; use a model without it"
            )
    if not _has_causal_model(settings):
        raise ConfigError(
            f"{key}: {path}: transformers has no causal language model of type"
            f" {settings.model_type}; use another model"
        )


def _has_causal_model(settings: Any) -> bool:
    """Whether transformers has a causal language model for these settings, or one whose tower can
    be left out. The names of its
    classes are known before any of them is loaded, which takes a second of processor time."""
    names = {name for name in settings.architectures or () if name.endswith("ForCausalLM")}
    if not names.isdisjoint(transformers.__all__) or settings.model_type in READERS:
        return True
    mapping = transformers.AutoModelForCausalLM._model_mapping
    return mapping.get(type(settings), None) is not None


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
    """Checks that the model has layers that the trainer can shard and compare.

    Raises ConfigError, which names the checkpoint.
    """
    decoder = model.get_decoder()
    if decoder is None or not hasattr(decoder, "layers"):
        raise ConfigError(
            f"model.path: {path}: {type(model).__name__} has no list of decoder layers;"
            " use another model"
        )


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """The parameters of rotary positions: one set, or one for each kind of layer."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        for each in parameters.values():
            yield from _ropes(each)
