"""The tensors of a model in training, as they stand in its checkpoint.

Invariant: what is exported or sent to engines has the names and shapes of the source checkpoint,
and holds everything that training can change or that the forward pass reads: weights and persistent
buffers (`e_score_correction_bias` of DeepSeek-V3, `layer_scalar` of Gemma 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from trainer.errors import ConfigError
from trainer.policy.image_reader import reader_of
from trainer.policy.loading import layer_of, names_in_source

Read = Callable[[Tensor], Tensor]
"""Gives the whole tensor of a parameter or buffer, which may be sharded."""
Named = tuple[str, Tensor]
Translate = Callable[[str, Tensor], Named]
"""Gives a whole tensor of the model transformers' name and shape, if it has others."""


def checkpoint_tensors(model: Any, translate: Translate | None = None) -> Iterator[Named]:
    """`(name, tensor)` as in the checkpoint: with merged adapters, gathered shards, experts one by
    one, and tied weights only once.

    transformers renames and fuses weights when it loads a checkpoint; this is reverted layer by
    layer, because a fused weight and its parts belong to one layer. Under FSDP every rank must
    iterate, because each tensor is gathered from all ranks.
    """
    return _reverted(model, _whole, translate)


def checkpoint_shapes(model: Any, translate: Translate | None = None) -> Iterator[Named]:
    """As `checkpoint_tensors`, without contents: on the device `meta`, and gathered from no other
    rank."""
    return _reverted(model, _empty, translate)


@torch.no_grad()
def _reverted(model: Any, read: Read, translate: Translate | None) -> Iterator[Named]:
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    for _, group in groupby(_merged(model, read), key=lambda each: layer_of(each[0])):
        named = dict(translate(*each) if translate else each for each in group)
        yield from _as_in_source(plain, named).items()


def _as_in_source(plain: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers reverts names by their pattern, also where only other layers of the checkpoint
    have the old name (OLMo Hybrid's norms): what the checkpoint has under the model's name keeps
    it."""
    reverted: dict[str, Tensor] = revert_weight_conversion(plain, named)
    source = names_in_source(plain)
    if not source or reverted.keys() <= source:
        return reverted
    same = {name: each for name, each in named.items() if name in source and name not in reverted}
    rest = {name: each for name, each in named.items() if name not in same}
    reverted = revert_weight_conversion(plain, rest)
    return reverted | same


def check_names(model: Any, path: Path) -> None:
    """Raises ConfigError: a tensor would be sent to engines and exported under a name that the
    checkpoint at `path` does not have."""
    source = names_in_source(model.get_base_model() if hasattr(model, "get_base_model") else model)
    unknown = [name for name, _ in checkpoint_shapes(model) if source and name not in source]
    if unknown:
        raise ConfigError(
            f"{path}: {len(unknown)} weights, such as {min(unknown)}, would get names that the "
            "checkpoint does not have; write it again with transformers' save_pretrained"
        )


def _merged(model: Any, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers under transformers' names, each layer's one after another."""
    adapted = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, tensor in _saved(model):
        if ".lora_" in name:
            continue
        whole = read(tensor)
        owner = name.removesuffix(".base_layer.weight")
        if owner in adapted and whole.is_meta:
            whole = whole.to(torch.promote_types(whole.dtype, _adapter_dtype(adapted[owner])))
        elif owner in adapted:
            whole = whole + _whole(adapted[owner].get_delta_weight("default"))
        yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), whole


def _adapter_dtype(module: Any) -> torch.dtype:
    """float32 also over weights in bfloat16: their sum is rounded only if engines hold bfloat16."""
    dtypes = (each.dtype for name, each in module.named_parameters() if "lora_" in name)
    dtype: torch.dtype = next(dtypes)
    return dtype


def _saved(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer once, in the order of the modules."""
    seen: set[Tensor] = set()
    reader = reader_of(model)
    if reader is not None and not reader.trained:  # its weights stay those of the checkpoint
        seen.update(reader.tower.parameters(), reader.tower.buffers())
    for prefix, module in model.named_modules():
        buffers = (
            (name, buffer)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        )
        for name, tensor in (*module.named_parameters(recurse=False), *buffers):
            if tensor not in seen:
                seen.add(tensor)
                yield f"{prefix}.{name}" if prefix else name, tensor


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
