"""Reads the weights of a checkpoint: the whole model at once, or one layer after another, so that a
rank keeps only its part of each.

Invariant: both give the same model, bit for bit. In both, transformers reads, renames and fuses the
tensors of the checkpoint; layers differ only in when they are read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.utils import logging

from trainer.errors import ConfigError
from trainer.policy.checkpoint_type import weight_files
from trainer.policy.towers import drop_tower, has_causal_class

Place = Callable[[nn.Module], None]
"""Shards a layer in place, so that this process keeps only its part of the layer's weights."""

_LAYER = re.compile(r".*\.layers\.\d+\.")


def layer_of(name: str) -> str:
    """The prefix of all tensors of a layer, or the name itself outside of layers.

    Example: layer_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3."
    """
    layer = _LAYER.match(name)
    return layer.group() if layer else name


def load_weights(
    path: Path,
    settings: Any,
    dtype: torch.dtype,
    *,
    place: Place | None = None,
    prepare: Callable[[Any], None] | None = None,
    without_head: bool = False,
    with_tower: bool = False,
) -> Any:
    """The causal model of the checkpoint. With `place`, each decoder layer is read, placed, and
    only then the next one is read; a checkpoint that is not in safetensors is read at once.
    `prepare` gets the model before its first layer is read, while its tensors have no memory; it
    is not called for a checkpoint that is read at once. `with_tower`: the class that reads images.

    Raises ConfigError if the checkpoint lacks weights of the model (`without_head`: those of the
    output layer may be missing), or has them in another shape.
    """
    with ExitStack() as stack:
        if place is not None:
            stack.enter_context(_layer_by_layer(place, prepare))
        whole = with_tower or not has_causal_class(settings)
        auto: Any = transformers.AutoModelForCausalLM
        if whole:
            auto = transformers.AutoModelForImageTextToText
        model, info = auto.from_pretrained(
            path,
            config=settings,
            dtype=dtype,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, with the name of the checkpoint
            output_loading_info=True,
        )
    missing = set(info["missing_keys"])
    if without_head:
        head = model.get_output_embeddings()
        missing -= {name for name, each in model.named_parameters() if each is head.weight}
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of the model's weights, such as {min(missing)}; they "
            "would be random. Use the folder of a whole checkpoint, whose config.json fits its "
            "weights"
        )
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise ConfigError(
            f"{path}: {name} has the shape {list(found)}, but its config.json says "
            f"{list(expected)}; use a checkpoint whose config.json fits its weights"
        )
    if whole and not with_tower:
        drop_tower(model)
    model._names_in_source = _names(path)
    return model


def names_in_source(model: Any) -> frozenset[str]:
    """The names of all tensors of the checkpoint that `load_weights` read; empty if it is not in
    safetensors."""
    names: frozenset[str] = getattr(model, "_names_in_source", frozenset())
    return names


def _names(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for file in weight_files(path):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return frozenset(names)


@contextmanager
def _layer_by_layer(place: Place, prepare: Callable[[Any], None] | None) -> Iterator[None]:
    """A context in which `from_pretrained` reads one layer after another, and places each. It
    shows no progress bar, because there would be one for each layer."""
    at_once: Callable[..., tuple[Any, Any]] = PreTrainedModel._load_pretrained_model

    def load(
        model: Any, state: Any, files: Sequence[str] | None, config: Any, *more: Any
    ) -> tuple[Any, Any]:
        if not files or not files[0].endswith(".safetensors"):
            return at_once(model, state, files, config, *more)
        if prepare is not None:
            prepare(model)
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
            tensors = {
                key: file.get_slice(key)
                for file in opened
                for key in file.keys()  # noqa: SIM118 (a file, not a dict)
            }
            return _load_layers(model, tensors, config, place), None

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(load)):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _load_layers(model: Any, tensors: Mapping[str, Any], config: Any, place: Place) -> Any:
    """Returns transformers' report of what was missing or unexpected."""
    layers = {id(layer) for layer in model.get_decoder().layers}
    report = None
    for prefix, part in _by_layer(model, tensors, config.weight_mapping or ()).items():
        found, _ = convert_and_load_state_dict_in_model(model, part, config)
        if report is None:
            report = found
        report.missing_keys &= found.missing_keys
        report.unexpected_keys |= found.unexpected_keys
        report.mismatched_keys |= found.mismatched_keys
        report.conversion_errors |= found.conversion_errors
        layer: Any = _module(model, prefix)
        if id(layer) in layers:
            place(layer)
            for weight in layer.parameters():  # otherwise transformers would initialise it again
                weight._is_hf_initialized = True
    return report


def _by_layer(
    model: Any, tensors: Mapping[str, Any], mapping: Sequence[Any]
) -> dict[str, dict[str, Any]]:
    """The tensors of the checkpoint by the layer of the model in which they end."""
    names = model.state_dict()
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, tensor in tensors.items():
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        layer = layer_of(name if name in names or key not in names else key)
        groups[layer if layer.endswith(".") else ""][key] = tensor
    return groups


def _module(model: Any, prefix: str) -> nn.Module | None:
    """The module of a layer's prefix; None if there is none."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return modules.get(prefix.removesuffix("."))
