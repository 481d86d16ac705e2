"""The LoRA adapter of a policy in training, in PEFT's format.

Invariant: `adapter_tensors` and `adapter_config`, saved as `adapter_model.safetensors` and
`adapter_config.json`, are an adapter on the checkpoint at `model.path`: the modules have the
checkpoint's names, so that vLLM and plain PEFT read it. An adapter on a module for which this is
impossible is refused when the model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from trainer.errors import ConfigError
from trainer.policy.checkpoint_type import weight_files

_PREFIX = "base_model.model."
"""PEFT's prefix of every module name."""
_PARTS = ("lora_A", "lora_B")
FILE_METADATA = {"format": "pt"}
"""Of the file of an adapter, which some readers ask for."""
_NAME = "default"
"""PEFT's name of the only adapter."""


@torch.no_grad()
def adapter_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of each low-rank matrix, gathered from all ranks. Under FSDP every rank must
    iterate."""
    for module, name in adapted_modules(model):
        for part in _PARTS:
            weight = getattr(module, part)[_NAME].weight.detach()
            whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
            yield f"{_PREFIX}{name}.{part}.weight", whole


def adapted_modules(model: Any) -> Iterator[tuple[Any, str]]:
    """Each module with an adapter, and its name in the checkpoint.

    Raises:
        ConfigError: PEFT's format cannot express an adapter on the module.
    """
    plain = model.get_base_model()
    for path, module in model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        name = path.removeprefix(_PREFIX)
        shape = module.base_layer.weight.shape
        weight = {f"{name}.weight": torch.empty(shape, device="meta")}
        saved = dict(revert_weight_conversion(plain, weight))
        stored = next(iter(saved))
        is_plain = len(saved) == 1 and stored.endswith(".weight") and saved[stored].shape == shape
        if not is_plain or not all(_NAME in getattr(module, part) for part in _PARTS):
            raise ConfigError(
                f"model.lora.target_modules: an adapter on {name} cannot be sent to engines (the "
                f"checkpoint has {', '.join(list(saved)[:2])}, and {type(module).__name__} is not "
                "a linear layer of its own); remove this layer, or set model.lora.update=merged"
            )
        yield module, stored.removesuffix(".weight")


class EarlyAdapters:
    """Adapters of a model that is read and sharded layer by layer. They are made before the first
    layer is read, so that they are those of a model that is read at once, bit for bit; then they
    are taken off, because a checkpoint is read into plain layers, and each layer gets its own back
    before it is sharded.

    Example:
    adapters = EarlyAdapters(add)  # get_peft_model, with its settings
    adapters.prepare(model)  # its tensors have no memory yet
    adapters.put_on(layer)  # for each layer that was read, before it is sharded
    model = adapters.complete(model)
    """

    def __init__(self, add: Callable[[Any], Any]) -> None:
        """`add` puts adapters on a model, and returns it in PEFT's wrapper."""
        self._add = add
        self._wrapped: Any = None
        self._off: list[tuple[nn.Module, str, nn.Module]] = []
        """(module, name of its child, that child with its adapter)"""

    def prepare(self, model: Any) -> None:
        """Makes the adapters, in memory, of a model without memory, and takes them off."""
        with _seems_in_memory(model):
            self._wrapped = self._add(model)
        adapted = [path for path, each in model.named_modules() if hasattr(each, "get_base_layer")]
        for path in adapted:
            above, _, name = path.rpartition(".")
            parent = model.get_submodule(above)
            self._off.append((parent, name, getattr(parent, name)))
            setattr(parent, name, getattr(parent, name).get_base_layer())

    def put_on(self, layer: nn.Module) -> None:
        """Puts the layer's adapters on it; nothing else of the layer is trained."""
        layer.requires_grad_(False)
        inside = {id(module) for module in layer.modules()}
        for parent, name, adapted in self._off:
            if id(parent) in inside:
                _plug(parent, name, adapted)

    def complete(self, model: Any) -> Any:
        """The model, in PEFT's wrapper, with the adapters outside of its layers, too."""
        if self._wrapped is None:  # the checkpoint was read at once
            return self._add(model)
        for parent, name, adapted in self._off:
            if getattr(parent, name) is not adapted:
                _plug(parent, name, adapted)
        for path, weight in self._wrapped.named_parameters():
            weight.requires_grad_("lora_" in path)
        return self._wrapped


def _plug(parent: nn.Module, name: str, adapted: nn.Module) -> None:
    setattr(parent, name, adapted)
    for path, weight in adapted.named_parameters():
        weight.requires_grad_("lora_" in path)


@contextmanager
def _seems_in_memory(model: nn.Module) -> Iterator[None]:
    """A context in which each weight without memory is one number in memory, repeated in the
    weight's shape. PEFT makes an adapter on the device and in the type of its layer's weight."""
    weights = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if weight.is_meta
    ]
    for module, name, weight in weights:
        seeming = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        setattr(module, name, nn.Parameter(seeming, requires_grad=False))
    try:
        yield
    finally:
        for module, name, weight in weights:
            setattr(module, name, weight)


def share_frozen_weights(model: Any, other: Any) -> None:
    """Makes the model use the frozen weights of the other, so that both need them only once. Both
    have adapters on the same checkpoint, which may be on different layers."""
    held = {
        _unadapted(name): weight.data
        for name, weight in other.named_parameters(remove_duplicate=False)
        if not weight.requires_grad
    }
    for name, weight in model.named_parameters(remove_duplicate=False):
        if not weight.requires_grad:
            weight.data = held[_unadapted(name)]


def _unadapted(name: str) -> str:
    """The name of a weight of the model without adapters."""
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def adapter_arguments(checkpoint: Path) -> list[str]:
    """Arguments by which vLLM adapts the checkpoint's linear layers, but not its output layer. By
    default vLLM adapts that too, and then log-probabilities of a prompt, by which an update is
    compared, end the engine if other calls run at the same time. Empty for a checkpoint without
    safetensors files."""
    found = set()
    for file in weight_files(checkpoint):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is not a mapping)
                layer, _, kind = name.rpartition(".")
                if kind == "weight" and len(weights.get_slice(name).get_shape()) == 2:
                    found.add(layer.rpartition(".")[2])
    layers = sorted(found - {"embed_tokens", "lm_head"})
    return ["--lora-target-modules", *layers] if layers else []


def check_adapter(model: Any, *, merged: bool) -> None:
    """Checks that engines can get the policy's updates.

    Raises:
        ConfigError: they cannot; names the module.
    """
    for path, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and not hasattr(module.base_layer, "weight"):
            raise ConfigError(
                f"model.lora.target_modules: an adapter on {path.removeprefix(_PREFIX)}, which is "
                "several experts in one, can be neither merged nor sent to engines; name other "
                "layers, such as [q_proj, k_proj, v_proj, o_proj]"
            )
    if not merged:
        for _ in adapted_modules(model):
            pass


def adapter_config(model: Any) -> dict[str, Any]:
    """The contents of `adapter_config.json`."""
    config = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in model.peft_config[_NAME].to_dict().items()
    }
    config["inference_mode"] = True
    served: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return served


def save_adapter(
    tensors: Iterable[tuple[str, Tensor]], config: dict[str, Any], folder: Path
) -> None:
    """Writes an adapter in PEFT's format."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors}
    save_file(held, folder / "adapter_model.safetensors", metadata=FILE_METADATA)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


class RandomAdapter:
    """Replaces the policy's adapter by a random one, by which engines are tested, from `enter` to
    `leave`. A new adapter changes nothing, because its second matrix is 0: an engine that ignores
    it would seem to serve it.
    """

    def __init__(self, model: Any, seed: int = 0) -> None:
        self._weights = [module.lora_B[_NAME].weight for module, _ in adapted_modules(model)]
        self._kept: list[Tensor] = []
        self._seed = seed

    @torch.no_grad()
    def enter(self) -> None:
        self._kept = [weight.detach().clone() for weight in self._weights]
        torch_state = torch.get_rng_state()
        torch.manual_seed(self._seed)
        for weight in self._weights:
            weight.normal_(0.0, 0.25 / weight.shape[1] ** 0.5)
        torch.set_rng_state(torch_state)

    @torch.no_grad()
    def leave(self) -> None:
        for weight, kept in zip(self._weights, self._kept, strict=True):
            weight.copy_(kept)
