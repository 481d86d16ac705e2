"""Models that read images: which they are, and their text alone.

A model without a causal class of its own in transformers (Qwen3-VL) is trained as a text model by
leaving its tower out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from torch import nn
from transformers import CONFIG_MAPPING

from trainer.errors import ConfigError

_QWEN = "trainer.extras.images.qwen:QwenReader"
READERS: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_vl": _QWEN,
        "qwen3_vl_moe": _QWEN,
        "qwen3_5": _QWEN,
        "qwen3_5_moe": _QWEN,
        "gemma3": "trainer.extras.images.gemma:GemmaReader",
    }
)
"""`model_type` → the reader of its images (`module:name`)."""
_WHOLE_IMAGES = ("gemma4",)
"""Models in which the tokens of an image see each other, otherwise than Gemma 3's."""


def check_reads(settings: Any, path: Path) -> None:
    """Raises ConfigError: the model's images cannot be trained."""
    if settings.model_type in READERS:
        return
    reason = "its images are not known to the trainer"
    if settings.model_type in _WHOLE_IMAGES:
        reason = "the tokens of an image see each other in it, which rows compute of gemma3 alone"
    elif getattr(settings, "vision_config", None) is None:
        reason = "it reads no images"
    raise ConfigError(
        f"model.vision: {path}: {settings.model_type}: {reason}; set model.vision=text, or use a "
        f"model of type {', '.join(sorted(READERS))}"
    )


def has_causal_class(settings: Any) -> bool:
    """Whether transformers has a causal language model without a tower for these settings."""
    mapping = transformers.AutoModelForCausalLM._model_mapping
    return mapping.get(type(settings), None) is not None


def text_model(text: Any, **arguments: Any) -> Any:
    """The causal language model of text settings, with random weights. A model whose class has a
    tower is made without it."""
    text = copy.deepcopy(text)
    if has_causal_class(text):
        return transformers.AutoModelForCausalLM.from_config(text, **arguments)
    kind = text.model_type.removesuffix("_text")
    tower = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    more = {"out_hidden_size": text.hidden_size, "deepstack_visual_indexes": []}
    whole = CONFIG_MAPPING[kind](text_config=text.to_dict(), vision_config=tower | more)
    model = transformers.AutoModelForImageTextToText.from_config(whole, **arguments)
    drop_tower(model)
    return model


def tower_of(settings: Any) -> nn.Module:
    """The tower of a model that reads images, with random weights; of Gemma 3 with the projector,
    which Qwen's towers have in them."""
    tower: nn.Module = transformers.AutoModel.from_config(copy.deepcopy(settings.vision_config))
    if settings.model_type != "gemma3":
        return tower
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    return nn.ModuleList([tower, Gemma3MultiModalProjector(settings)])


def drop_tower(model: Any) -> None:
    """Makes a model that reads images a text model."""
    model.model.visual = None
    model.config.sub_configs = {"text_config": type(model.config.text_config)}
