"""vLLM's own reload of a model's weights, and what vLLM's side of every backend does with it.

Runs inside vLLM's worker processes. Invariant: an update is applied completely, or fails with an
error that its caller receives. It fails if a weight of the model, or a part of a fused weight such
as `gate_proj`, was not updated, whatever names vLLM's loader says it has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer

from trainer.weight_sync.segment import Named

_COPIED = {
    "GptOssForCausalLM": {"sinks", "w13_weight"},
    "MiMoV2FlashForCausalLM": {"attention_sink_bias"},
}
"""vLLM's class → weights of the layers that its `load_weights` itself copies."""

_SAVED_BUFFERS = ("layer_scalar",)
"""Ends of the names of buffers of vLLM's classes that checkpoints hold: of Gemma 4's layers."""
_HEAD = ".lm_head.weight"
Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class Reload:
    """One reload of a model by vLLM's own loader. After `load`, also one that failed, `finish` must
    be called: it completes the layers."""

    def __init__(self, model: torch.nn.Module, model_config: Any, device: torch.device) -> None:
        self._model, self._config, self._device = model, model_config, device
        self._loaded: set[str] = set()
        self._packed = _unpack_experts(model) if device.type == "cpu" else []
        _name_loaders(model)
        initialize_layerwise_reload(model)
        self._direct = dict(_written_directly(model))
        for layer in self._direct.values():
            materialize_layer(layer, get_layerwise_info(layer))
            for weight in _own_weights(layer):
                weight.data.fill_(torch.nan)

    def load(self, tensors: Iterable[Named]) -> None:
        """Raises ValueError: the update does not contain every weight, or only a part of one."""
        self.load_part(tensors)
        self.check()

    def load_part(self, tensors: Iterable[Named]) -> None:
        """Loads some of the weights, which may be overwritten when it returns."""
        there = ((name, tensor.to(self._device)) for name, tensor in tensors)
        loaded = self._model.load_weights(there)  # type: ignore[operator]
        self._loaded |= set(self._expected() if loaded is None else loaded)
        for layer in self._direct.values():  # so that vLLM processes it, and keeps what it has
            info = get_layerwise_info(layer)
            info.load_numel = max(1, info.load_numel)

    def check(self) -> None:
        """After all parts. Raises ValueError: as `load`."""
        missing = self._expected() - self._loaded
        if missing:
            raise ValueError(f"the update did not contain these weights: {sorted(missing)[:5]}")
        if partial := self._partly_loaded():
            raise ValueError(f"the update contained only a part of these layers: {partial[:5]}")
        if untouched := self._not_loaded():
            raise ValueError(
                f"vLLM's loader of {type(self._model).__name__} loads nothing into these layers "
                f"when weights are updated: {untouched[:5]}; train another model, or adapters "
                "(model.lora.update=adapter)"
            )

    def finish(self) -> None:
        finalize_layerwise_reload(self._model, self._config)
        for method, kernel in self._packed:
            if method.moe_kernel is None:  # its layer was not reloaded
                method.moe_kernel = kernel
        if self._device.type == "cpu":
            _repack_embeddings(self._model)

    def _expected(self) -> set[str]:
        """Names of the weights that the trainer sends: those of the language model and its saved
        buffers; with any weight of a tower (vision, audio), all of the towers."""
        model = self._model
        part = getattr(model, "get_language_model", lambda: model)()
        sent = {id(parameter) for parameter in part.parameters()}
        others = (name for name, each in model.named_parameters() if id(each) not in sent)
        towers = {name for name in others if not f".{name}".endswith(_HEAD)}
        sent |= {id(each) for name, each in part.named_buffers() if name.endswith(_SAVED_BUFFERS)}
        named = chain(model.named_parameters(), model.named_buffers())
        names = {name for name, each in named if id(each) in sent}
        if not towers.isdisjoint(self._loaded):
            names |= towers
        settings = (self._config.hf_config, self._config.hf_text_config)
        if any(getattr(each, "tie_word_embeddings", False) for each in settings):
            return {name for name in names if not f".{name}".endswith(_HEAD)}
        return names

    def _partly_loaded(self) -> list[str]:
        """Layers that received only some elements of their weights. Embeddings are not included:
        their padding is never sent, and a missing embedding is found by its name."""
        unwritten = (
            name
            for name, layer in self._direct.items()
            if any(weight.isnan().any() for weight in _own_weights(layer))
        )
        return [*unwritten] + [
            name
            for name, layer in self._model.named_modules()
            if not isinstance(layer, VocabParallelEmbedding)
            and name not in self._direct
            and (info := get_layerwise_info(layer)).can_load()
            and 0 < info.load_numel < sum(p.numel() for p in layer.parameters(recurse=False))
        ]

    def _not_loaded(self) -> list[str]:
        """Layers of the language model that have weights and received none. The loader may have
        written to their placeholders on the device meta, which is lost."""
        part = getattr(self._model, "get_language_model", lambda: self._model)()
        parts = {id(module) for module in part.modules()}
        return [
            name
            for name, layer in self._model.named_modules()
            if id(layer) in parts
            and not isinstance(layer, VocabParallelEmbedding)
            and not is_deferred_attention_layer(layer)
            and (info := get_layerwise_info(layer)).can_load()
            and info.load_numel == 0
            and any(weight.numel() for weight in _own_weights(layer))
        ]


def _name_loaders(model: torch.nn.Module) -> None:
    """vLLM 0.32's reload asks each weight's loader for its name (`layerwise.py`, line 143), which
    those of MiniMax-M2's norms do not have (`rms_norm_tp.py`, line 301)."""
    for weight in model.parameters():
        loader: Any = getattr(weight, "weight_loader", None)
        if isinstance(loader, partial) and not hasattr(loader, "__name__"):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def _own_weights(layer: torch.nn.Module) -> list[torch.Tensor]:
    own = layer.named_parameters(recurse=False)
    return [weight for name, weight in own if name not in SKIP_TENSORS]


def _written_directly(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The layers into which the model's loader copies weights itself, past the parameters' loaders,
    which are all that vLLM's reload counts. They need memory before they are loaded."""
    own = _COPIED.get(type(model).__name__, set())
    for name, layer in model.named_modules():
        if any(layer._parameters.get(each) is not None for each in own):
            yield name, layer


class ReloadingEngine(WeightTransferEngine[Init, Update]):  # type: ignore[misc]
    """A subclass receives the weights, and implements `init_transfer_engine`, `_load` and
    `shutdown`."""

    _reload: Reload | None = None

    def start_weight_update(self) -> None:
        """Nothing: the reload begins when the weights are there."""

    def receive_weights(self, update_info: Update) -> None:
        try:
            self._load(update_info)
        except BaseException:
            # Ends the reload, so that the next update starts with complete layers.
            self.finish_weight_update()
            raise

    def finish_weight_update(self) -> None:
        if self._reload is not None:
            self._reload.finish()
            self._reload = None

    def _load(self, update_info: Update) -> None:
        """Receives the weights and gives them to `_load_tensors`."""
        raise NotImplementedError

    def _load_tensors(self, tensors: Iterable[Named]) -> None:
        """Raises ValueError: as `Reload.load`."""
        self._reload = Reload(self.model, self.model_config, self.device)
        self._reload.load(tensors)


def _unpack_experts(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Makes vLLM pack the experts of each layer again when they are reloaded. It does so only when
    it creates the layer's kernel, and would later copy unpacked weights over packed ones without
    any error: the experts would compute with shuffled weights.

    Returns pairs of a layer's method and the kernel that was removed from it. If the layer is not
    reloaded, its method needs the kernel back.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    packed = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            packed.append((method, method.moe_kernel))
            method.moe_kernel = None
    return packed


def _repack_embeddings(model: torch.nn.Module) -> None:
    """Packs tied output layers again. On CPU, vLLM keeps a second copy of each linear weight,
    packed for oneDNN. A tied `lm_head` is not reloaded under its own name, so that its packed copy
    would keep the old weights without any error: the server would sample from a mixture of old and
    new weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
