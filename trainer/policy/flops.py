"""Model FLOPs utilisation, where the device's peak is known.

Invariant: an unknown device gives no figure, rather than one against a guessed peak.
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
"""Dense bf16 with fp32 accumulation, from NVIDIA's data sheets; the first name that is part of the
device's name counts."""


def training_flops(model: Any, batch: Batch, *, passes: float) -> float:
    """FLOPs to train on the batch: 6 per weight and token, and attention's 12 · layers · width ·
    length per token (Chowdhery et al., PaLM, appendix B), `passes` times.

    A forward pass alone is a third of a pass. Shared prefixes are counted as if computed for every
    sequence, so sharing shows as a higher utilisation.
    """
    text = model.config.get_text_config()
    weights = sum(p.numel() for p in model.parameters()) - _embedding_weights(model)
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    per_length = 12 * text.num_hidden_layers * width
    lengths = [len(ids) for ids in batch.sequences]
    dense = 6 * weights * sum(lengths)
    attention = per_length * sum(length * length for length in lengths) / 2  # causal
    return float(passes * (dense + attention))


def utilisation(flops: float, seconds: float, device: torch.device, ranks: int) -> float | None:
    """Share of the devices' peak; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for known, peak in PEAK_BF16_FLOPS.items():
        if known in name:
            return flops / seconds / (peak * ranks)
    return None


def _embedding_weights(model: Any) -> int:
    """Looked up, not multiplied; a tied output layer is multiplied, and so counted."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    return 0 if tied else int(inputs.weight.numel())
