"""Model FLOPs utilisation on devices whose peak is known.

Invariant: for an unknown device there is no result, because its peak would be a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trainer.batch import Batch

PEAK_BF16_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "H200": 989e12,
        "H100 PCIe": 756e12,
        "H100": 989e12,
        "H20": 148e12,
        "A100": 312e12,
        "L40S": 362e12,
        "A10": 125e12,
    }
)
"""Part of a device's name → its peak in FLOP/s for dense bf16 with fp32 accumulation, from NVIDIA's
data sheets. The first key that is part of the device's name applies."""


def training_flops(settings: Any, weights: int, batch: Batch, *, passes: float) -> float:
    """FLOPs to train on the batch: 6 per weight and token, plus 12 · layers · width · length per
    token for attention (Chowdhery et al., PaLM, appendix B), multiplied by `passes`.

    A forward pass alone counts as a third of a pass. Shared prefixes are counted for every
    sequence, so that sharing them raises the utilisation. `settings` are those of `config.json`,
    `weights` the `multiplied_weights`.
    """
    text = settings.get_text_config()
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    per_length = 12 * text.num_hidden_layers * width
    lengths = [len(ids) for ids in batch.sequences]
    dense = 6 * weights * sum(lengths)
    attention = per_length * sum(length * length for length in lengths) / 2  # causal
    return float(passes * (dense + attention))


def utilisation(flops: float, seconds: float, device: torch.device, ranks: int) -> float | None:
    """Share of the peak of all devices; None if the peak is unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, peak in PEAK_BF16_FLOPS.items():
        if known in name:
            return flops / seconds / (peak * ranks)
    return None


def multiplied_weights(model: Any) -> int:
    """Number of weights by which each token is multiplied."""
    count = sum(int(p.numel()) for p in model.parameters())
    return count - _embedding_weights(model)


def _embedding_weights(model: Any) -> int:
    """Number of weights that are looked up and not multiplied: the embeddings, unless the output
    layer shares them."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    return 0 if tied else int(inputs.weight.numel())
