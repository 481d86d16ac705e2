"""vLLM's OLMo Hybrid, which in vLLM 0.32 and 0.33 loads no checkpoint, made to load all.

Its weights of convolutions are three tensors in a checkpoint and one in vLLM, whose loader does not
read which of them it is given (`olmo_gdn_linear_attn.py`, line 516). And it knows the norms of
linear layers only as transformers' model calls them (`olmo_hybrid.py`, lines 241 and 245), not as
AI2's program and `save_pretrained` write them.

Runs inside vLLM's processes. Invariant: a name that vLLM's class knows is loaded as it loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.model_executor.models import olmo_hybrid

RENAMED = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}


class OlmoHybridForCausalLM(olmo_hybrid.OlmoHybridForCausalLM):  # type: ignore[misc]
    """Takes the place of vLLM's class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, weight in self.named_parameters():
            if name.endswith(".conv1d.weight"):
                weight.weight_loader = _of_part(weight.weight_loader)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = super().load_weights((_renamed(name), each) for name, each in weights)
        return loaded


def _of_part(load: Callable[..., None]) -> Callable[..., None]:
    """A loader that gets the part's number as vLLM's other loaders do, from the tensor."""

    def load_part(param: Any, loaded_weight: Any, loaded_shard_id: int | None = None) -> None:
        load(param, loaded_weight, getattr(loaded_weight, "shard_id", loaded_shard_id))

    return load_part


def _renamed(name: str) -> str:
    for written, known in RENAMED.items():
        name = name.replace(written, known)
    return name
