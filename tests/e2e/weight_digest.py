"""An extension of vLLM's workers that returns a digest of every weight with which a model computes.

`--worker-extension-cls tests.e2e.weight_digest.WeightDigest`
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class WeightDigest:
    def weight_digest(self: Any) -> list[str]:
        """SHA-256 over each parameter and buffer, and over the product of the unit matrix with each
        weight that vLLM keeps only packed."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        total = hashlib.sha256()
        model = self.get_model()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                _add(total, name, tensor)
            for name, module in model.named_modules():
                packed = module.__dict__.get("cpu_linear", torch.nn.functional.linear)
                if packed is not torch.nn.functional.linear:
                    loaded = get_layerwise_info(module).restore_metadata[0]["weight"]
                    unit = torch.eye(loaded.shape[-1], dtype=loaded.dtype)
                    _add(total, name, packed(unit, module.weight, None))
        return [total.hexdigest()]


def _add(total: Any, name: str, tensor: torch.Tensor) -> None:
    flat = tensor.detach().contiguous().view(-1)
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
    total.update(flat.view(torch.uint8).numpy().data)
