"""A twin of a vLLM model, which vLLM's own loader fills with new weights while the model samples.

The twin has the model's modules and settings, and its own memory for everything that a load
writes. Taking the new weights over is then a copy of the tensors that vLLM keeps as they are
(embeddings, norms, experts), and a change of reference for each weight that it keeps packed, which
for a CPU are all linear layers.

Which tensors and references these are is observed once, at a load by vLLM into the model itself
(`Observation`). `learn` then loads the same weights, multiplied by −2, into a twin whose memory
contains NaN, and compares: both loads must have written the same tensors and replaced the same
references, and the twin's values and products must be exactly −2 times those of the model. A twin
that took weights from the model instead of the load would differ. So does a model of which vLLM
transforms weights other than by copies and packing; it has no plan, and its weights cannot be
staged.

Runs inside vLLM's worker processes, on CPUs. Invariant: a model with a plan computes the same bits
after `adopt` as after a load by vLLM, and nothing of it changes before `adopt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from trainer.weight_sync.segment import Named

Place = tuple[str, str]
"""A module's name in the model, and the name of one of its tensors or attributes."""
Load = Callable[[torch.nn.Module, Iterable[Named]], None]
"""Loads all weights into a model by vLLM's own loader."""

_PROBE_ROWS = 4
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_BOOKKEEPING = {
    "_do_torchao_reload",
    "_original_do_torchao_reload",
    "_already_called_process_weights_after_loading",
}
"""Attributes by which vLLM knows that a load is running or done."""


class UnstageableError(Exception):
    """The model's weights can only be loaded while it does not sample; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a load changes in a model.

    Example: Plan(
        written=frozenset({("model.norm", "weight")}),
        replaced=frozenset({("model.layers.0.mlp.down_proj", "cpu_linear")}))
    """

    written: frozenset[Place]
    """Parameters and buffers whose contents the load writes."""
    replaced: frozenset[Place]
    """Attributes that the load sets to another object."""
    constant: frozenset[Place] = frozenset()
    """Those of both to which every load gives the same value, such as unused scales."""


class Twin:
    """The twin of a model, without weights."""

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self._plan = plan
        self._modules = {id(m): _bare(m) for m in model.modules()}
        self._tensors: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            self._furnish(name, module)
        self.model = twin = self._modules[id(model)]
        places = plan.written - plan.constant
        self._written = [(_found(model, at), _found(twin, at)) for at in places]
        self._replaced = [
            (model.get_submodule(name), twin.get_submodule(name), attribute)
            for name, attribute in plan.replaced - plan.constant
        ]

    def adopt(self) -> None:
        """Gives the loaded weights to the model, which must not sample at this time. The twin
        holds what it replaces until `discard`, because freeing it takes time."""
        for live, loaded in self._written:
            live.data.copy_(loaded.data)
        for live_module, loaded_module, attribute in self._replaced:
            own, other = live_module.__dict__, loaded_module.__dict__
            own[attribute], other[attribute] = other[attribute], own.get(attribute)

    def discard(self) -> None:
        """Frees the twin's memory. Modules and their tensors refer to each other, and vLLM's
        description of a module to the module."""
        for twin in self._modules.values():
            get_layerwise_info(twin).restore_metadata = ({}, {})
            twin.__dict__.clear()
        self._modules.clear()
        self._tensors.clear()
        self._written.clear()
        self._replaced.clear()

    def _furnish(self, name: str, module: torch.nn.Module) -> None:
        twin = self._modules[id(module)]
        for key, value in module.__dict__.items():
            twin.__dict__[key] = value if key in _REGISTRIES else self._own(value)
        for kind in ("_parameters", "_buffers"):
            tensors = {
                key: self._memory(tensor) if (name, key) in self._plan.written else tensor
                for key, tensor in module.__dict__[kind].items()
            }
            twin.__dict__[kind] = tensors
        children = module._modules.items()
        twin.__dict__["_modules"] = {k: m and self._modules[id(m)] for k, m in children}
        twin.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        ours, theirs = get_layerwise_info(twin), get_layerwise_info(module)
        ours.restore_device = theirs.restore_device
        parameters, buffers = theirs.restore_metadata
        ours.restore_metadata = (
            {key: self._described(tensor, twin) for key, tensor in parameters.items()},
            {key: self._described(tensor, twin) for key, tensor in buffers.items()},
        )

    def _own(self, value: Any) -> Any:
        """The twin's own of what refers to a module of the model."""
        if isinstance(value, torch.nn.Module):
            return self._modules.get(id(value), value)
        if isinstance(value, MethodType):
            return value.__func__.__get__(self._own(value.__self__))
        if type(value) in (list, tuple):
            return type(value)(self._own(each) for each in value)
        return value

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            empty = torch.empty_like(tensor.data)
            empty.fill_(torch.nan if empty.is_floating_point() else 0)
            self._tensors[id(tensor)] = self._like(tensor, empty)
        return self._tensors[id(tensor)]

    def _described(self, metadata: torch.Tensor, twin: torch.nn.Module) -> torch.Tensor:
        """A copy of vLLM's description of an unloaded tensor, bound to the twin's module."""
        own = self._like(metadata, metadata.data.to("meta"))
        for key, value in own.__dict__.items():
            while hasattr(value, "__wrapped__"):  # by an earlier reload of the model
                value = value.__wrapped__
            if isinstance(value, MethodType) and not isinstance(value.__self__, torch.nn.Module):
                value = value.__func__.__get__(twin)  # vLLM's placeholder for the module
            own.__dict__[key] = self._own(value)
        return own

    def _like(self, tensor: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        content.__class__ = tensor.__class__
        content.__dict__ = {key: self._own(value) for key, value in tensor.__dict__.items()}
        return content


class Observation:
    """What happens to a model while `watch` runs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.plan = Plan(frozenset(), frozenset())
        self.others: list[str] = []
        """Attributes of objects other than modules that were replaced: vLLM keeps something about
        the weights there that a twin would share with the model."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        modules, objects = _attributes(self._model), _objects(self._model)
        with _Writes() as writes:
            yield
        self.plan = Plan(
            frozenset(
                place
                for place, tensor in _tensors(self._model)
                if tensor.numel() and tensor.untyped_storage().data_ptr() in writes.storages
            ),
            frozenset(_replaced(modules, _attributes(self._model))),
        )
        now = _objects(self._model)
        self.others = [f"{name}.{key}" for name, key in _replaced(objects, now)]


def learn(model: torch.nn.Module, seen: Observation, load: Load, tensors: Iterable[Named]) -> Plan:
    """`seen` is vLLM's own load of `tensors` into the model, which must not sample now.

    Raises:
        UnstageableError: a twin's weights would differ from those of the model.
    """
    if seen.others:
        raise UnstageableError(f"vLLM keeps derived weights in {seen.others[:3]}")
    if any(map(_has_biases, model.modules())):
        raise UnstageableError("its experts have biases, to which their kernels refer")
    if stale := list(_stale(model, seen.plan)):
        raise UnstageableError(f"a load changes nothing of {stale[:3]}")
    twin = Twin(model, seen.plan)
    try:
        constant = _compare(model, twin.model, seen.plan, load, tensors)
    finally:
        twin.discard()
    return replace(seen.plan, constant=constant)


def _compare(
    model: torch.nn.Module,
    twin: torch.nn.Module,
    plan: Plan,
    load: Load,
    tensors: Iterable[Named],
) -> frozenset[Place]:
    """Loads the scaled weights into the twin. Returns the places that do not depend on weights."""
    theirs, ours = Observation(twin), Observation(model)
    with ours.watch(), theirs.watch():
        load(twin, ((name, _scaled(tensor)) for name, tensor in tensors))
    if ours.plan != Plan(frozenset(), frozenset()) or ours.others:
        raise UnstageableError(f"a load into its twin changes the model: {ours.plan}")
    if theirs.plan != plan:
        differing = (theirs.plan.written ^ plan.written) or (theirs.plan.replaced ^ plan.replaced)
        raise UnstageableError(f"a load into its twin does not change {sorted(differing)[:3]}")
    constant = set()
    for place in plan.written | plan.replaced:
        if _is_scaled(model, twin, place):
            continue
        pair = _found(model, place), _found(twin, place)
        if not (all(isinstance(each, torch.Tensor) for each in pair) and torch.equal(*pair)):
            raise UnstageableError(f"its twin gives {'.'.join(place)} other values")
        constant.add(place)
    return frozenset(constant)


def _has_biases(module: torch.nn.Module) -> bool:
    settings = getattr(module, "moe_quant_config", None)
    return any(getattr(settings, key, None) is not None for key in ("w1_bias", "w2_bias"))


def _stale(model: torch.nn.Module, plan: Plan) -> Iterator[str]:
    """Layers of the language model that a load does not reach, or whose packed weights it does not
    replace."""
    part = getattr(model, "get_language_model", lambda: model)()
    parts = {id(module) for module in part.modules()}
    reached = {name for name, _ in plan.written | plan.replaced}
    for name, module in model.named_modules():
        if id(module) not in parts:
            continue
        packed = module.__dict__.get("cpu_linear", torch.nn.functional.linear)
        replaced = (name, "cpu_linear") in plan.replaced
        loads = bool(get_layerwise_info(module).restore_metadata[0])
        if (loads and name not in reached) or (
            packed is not torch.nn.functional.linear and not replaced
        ):
            yield name


def _scaled(tensor: torch.Tensor) -> torch.Tensor:
    """Exact in every floating-point format. Neither a copy of the old values nor a function of
    their sizes gives the same."""
    return tensor.data * -2 if tensor.is_floating_point() else tensor.data


def _is_scaled(model: torch.nn.Module, twin: torch.nn.Module, place: Place) -> bool:
    """Whether the twin's tensor, or packed weight, which can only be multiplied, is the scaled
    one."""
    ours, theirs = _found(model, place), _found(twin, place)
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and torch.equal(_scaled(ours), theirs)
    if place[1] != "cpu_linear":
        return False
    own, other = model.get_submodule(place[0]), twin.get_submodule(place[0])
    weight = get_layerwise_info(own).restore_metadata[0]["weight"]
    generator = torch.Generator().manual_seed(0)  # the default one samples the engine's answers
    rows = torch.randn(_PROBE_ROWS, weight.shape[-1], generator=generator).to(weight.dtype)
    return torch.equal(_scaled(ours(rows, own.weight, None)), theirs(rows, other.weight, None))


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the addresses of the memory that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else named.get(argument.name)
                if isinstance(value, torch.Tensor) and value.device.type != "meta":
                    self.storages.add(value.untyped_storage().data_ptr())
        return func(*args, **named)


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    twin: torch.nn.Module = object.__new__(type(module))
    return twin


def _tensors(model: torch.nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for name, module in model.named_modules():
        for key, tensor in (module._parameters | module._buffers).items():
            if tensor is not None:
                yield (name, key), tensor


def _found(model: torch.nn.Module, place: Place) -> Any:
    return getattr(model.get_submodule(place[0]), place[1])


def _attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of each module that are neither its tensors nor its children."""
    return {
        name: {k: v for k, v in module.__dict__.items() if k not in _REGISTRIES}
        for name, module in _kept(model)
    }


def _kept(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules without the methods of unpacked experts: a reload creates their kernels again,
    which contain no weights."""
    for name, module in model.named_modules():
        if not isinstance(module, UnquantizedFusedMoEMethod):
            yield name, module


def _objects(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes of vLLM's objects that modules hold and that are not modules."""
    return {
        f"{name}.{key}": dict(vars(value))
        for name, module in _kept(model)
        for key, value in module.__dict__.items()
        if type(value).__module__.startswith("vllm.")
        and hasattr(value, "__dict__")
        and not isinstance(value, torch.nn.Module)
    }


def _replaced(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> Iterator[Place]:
    for name, attributes in after.items():
        old = before.get(name, {})
        for key, value in attributes.items():
            if key not in _BOOKKEEPING and not _unchanged(old.get(key, _MISSING), value):
                yield name, key


_MISSING = object()


def _unchanged(old: Any, new: Any) -> bool:
    plain = isinstance(new, bool | int | float | str | None)
    return old is new or (plain and type(old) is type(new) and old == new)
