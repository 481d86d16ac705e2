"""An extension of vLLM's workers that returns a digest of every weight with which a model computes.

`--worker-extension-cls tests.e2e.weight_digest.WeightDigest`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def computed(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter and buffer, and the product of the unit matrix with each weight that vLLM
    keeps only packed."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield name, tensor.detach().clone()
        for name, module in model.named_modules():
            packed = module.__dict__.get("cpu_linear", torch.nn.functional.linear)
            if packed is not torch.nn.functional.linear:
                loaded = get_layerwise_info(module).restore_metadata[0]["weight"]
                unit = torch.eye(loaded.shape[-1], dtype=loaded.dtype)
                yield f"{name}.packed", packed(unit, module.weight, None)


def fresh(config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What a new model computes with that loads these weights, in vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    layers = config.compilation_config.static_forward_context
    own = dict(layers)
    layers.clear()
    try:
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(config.model_config.dtype),
            torch.no_grad(),
        ):
            model = initialize_model(vllm_config=config)
            model.load_weights(weights)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            return dict(computed(model))
    finally:
        layers.clear()
        layers.update(own)


class WeightDigest:
    def weight_digest(self: Any) -> list[str]:
        """SHA-256 over all that the model computes with."""
        return [_digest(computed(self.get_model()))]

    def fresh_digest(self: Any, path: str) -> list[str]:
        """The same of a new model that loads a file of safetensors."""
        from safetensors.torch import load_file

        return [_digest(fresh(self.vllm_config, load_file(path).items()).items())]


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in tensors:
        _add(total, name, tensor)
    return total.hexdigest()


def _add(total: Any, name: str, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().view(-1)
    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
    total.update(flat.view(torch.uint8).numpy().data)
