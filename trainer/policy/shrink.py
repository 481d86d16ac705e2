"""Small configurations of an architecture: the same code, every kind of layer, few weights.

Invariant: a shrunk configuration keeps everything that selects code or a formula (types of layers,
activations, positions, scales, head sizes, groups of experts) and lowers only widths and counts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.initialization import no_init_weights

from trainer.policy.towers import text_model

VOCABULARY = 128
WINDOW = 5
"""Shorter than every path of the proof, so that each path crosses it."""
_WIDTHS = {
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "ffn_hidden_size": 48,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "laurel_rank": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
}
"""Sizes that no other setting must fit → the largest in a small copy."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")
_TIED_WIDTHS = frozenset({"helium"})
"""Models with a setting of the head size whose code takes the width for heads · head size."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "sliding_window_size")


def shrunk(settings: Any, times: int = 1) -> Any:
    """A small copy of the text settings with every kind of layer of the original, and with so many
    times the layers that this needs, as far as the original has them."""
    small = copy.deepcopy(settings.get_text_config())
    _narrow(small)
    kinds = layer_kinds(small)
    depth = 1 + max(kinds.index(kind) for kind in set(kinds))
    _cut(small, min(max(depth, 2) * times, len(kinds)))
    return small


def number_of(text: Any, names: Sequence[str]) -> int:
    """The first of these settings that the model has, `EXPERTS` or `CHOSEN`; 0 if it has none."""
    values = (getattr(text, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), 0)


def with_depth(settings: Any, depth: int) -> Any:
    """A copy of the text settings with the first `depth` layers only."""
    short = copy.deepcopy(settings.get_text_config())
    _cut(short, depth)
    return short


def _narrow(small: Any) -> None:
    heads, groups = small.num_attention_heads, getattr(small, "num_key_value_heads", None)
    free = vars(small).get("head_dim") is not None  # the width need not be heads · head size
    free = free and small.model_type not in _TIED_WIDTHS
    few = 4 if groups != heads else 2
    small.hidden_size = 64 if free else few * (small.hidden_size // heads)
    small.num_attention_heads = few
    if groups is not None:
        small.num_key_value_heads = min(groups, 2)
    for name, size in _WIDTHS.items():
        _lower(small, name, size)
    for name in EXPERTS:
        _lower(small, name, max(8, 2 * (getattr(small, "n_group", None) or 1)))
    for name in CHOSEN:
        _lower(small, name, 3)
    for name in _WINDOWS:
        _lower(small, name, WINDOW)
    if getattr(small, "linear_num_key_heads", None):
        ratio = small.linear_num_value_heads // small.linear_num_key_heads
        small.linear_num_key_heads, small.linear_num_value_heads = 2, 2 * min(ratio, 2)
        small.linear_key_head_dim = small.linear_value_head_dim = 16
    small.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, 0)


def _lower(small: Any, name: str, size: int) -> None:
    value = getattr(small, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > size:
        setattr(small, name, size)
    elif isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
        setattr(small, name, [min(each, size) for each in value])


def _cut(small: Any, depth: int) -> None:
    """Keeps the first `depth` layers."""
    whole = small.num_hidden_layers
    exceptions = small.to_dict().get("per_layer_config") or {}  # settings of single layers
    shared = getattr(small, "num_kv_shared_layers", None)
    for name, value in list(vars(small).items()):  # layer_types and the like
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(small, name, value[:depth])
    small.num_hidden_layers = depth
    if exceptions:
        small.per_layer_config = {k: v for k, v in exceptions.items() if int(k) < depth}
    if shared:
        small.num_kv_shared_layers = max(0, depth - (whole - shared))


def layer_kinds(small: Any) -> list[tuple[Any, ...]]:
    """What the code of each layer depends on: its modules, and their settings except its index."""
    with torch.device("meta"), no_init_weights():
        model = text_model(small)
    return [_kind(layer) for layer in model.get_decoder().layers]


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, type(module).__name__, *_scalars(module)) for name, module in layer.named_modules()
    )


def _scalars(module: nn.Module) -> list[tuple[str, Any]]:
    """The module's settings, without its index and without what it keeps for later layers."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
        and not name.endswith(("idx", "index"))
        and not name.startswith("store")
    )
