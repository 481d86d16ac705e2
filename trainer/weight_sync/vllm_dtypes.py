"""Reports in which type a vLLM worker holds each weight that the trainer would send.

vLLM's own loader is executed on tensors without contents (torch's device `meta`), into a twin of
the model whose tensors have none either, and what it does with each weight is observed. Names need
not be compared: the loader itself renames, fuses, splits and skips.

Runs inside vLLM's worker processes, also while the engine serves. Invariants: nothing of the model
changes. A weight of which a load does more than copy it, such as `A = -exp(A_log)`, is reported in
the type in which it is sent, because rounding it first would give other bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.weight_sync.dtypes import Report, dtype_name
from trainer.weight_sync.segment import Named

aten: Any = torch.ops.aten


@cache
def install() -> None:
    """Gives `held_dtypes` to vLLM's workers, which `/collective_rpc` calls by its name."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    WorkerWrapperBase.held_dtypes = held_dtypes


def held_dtypes(worker: Any, described: str) -> list[str | None] | dict[str, str]:
    """The worker's Report on weights that are `described` as JSON: a list of name, dtype, shape.

    Any error is a report, too: one that vLLM's executor raises leaves the responses of the other
    workers in its queues (`vllm_responses.py`).
    """
    try:
        from vllm.config import set_current_vllm_config

        weights = [
            (name, torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
            for name, dtype, shape in json.loads(described)
        ]
        with set_current_vllm_config(worker.vllm_config):
            return list(observed(worker.get_model(), weights))
    except Exception as error:  # noqa: BLE001 (of the loader of any model)
        return {"error": f"{type(error).__name__}: {error}"}


@torch.no_grad()
def observed(model: torch.nn.Module, weights: Sequence[Named]) -> Report:
    """What a load of these weights, which are on the device `meta`, would do."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta

    from trainer.weight_sync.vllm_twin import Plan, Twin

    twin, uses = Twin(model, Plan(frozenset(), frozenset())), _Uses(weights)
    try:
        for module in twin.model.modules():
            restore_layer_on_meta(module, get_layerwise_info(module))
        with uses:
            twin.model.load_weights(iter(weights))  # type: ignore[operator]
        uses.kept(tensor for module in twin.model.modules() for tensor in _tensors(module))
    finally:
        twin.discard()
    return uses.report()


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes what operations do with weights, and executes none on tensors that have contents,
    which belong to the model that serves."""

    def __init__(self, weights: Sequence[Named]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights
        self._numbers = {_storage(tensor): i for i, (_, tensor) in enumerate(weights)}
        """Where a weight or an exact copy of it is → its number."""
        self._copies: list[torch.Tensor] = []  # so that no other tensor gets their addresses
        self._types: list[set[torch.dtype]] = [set() for _ in weights]

    def report(self) -> list[str | None]:
        return [
            (dtype_name(found.pop() if len(found) == 1 else tensor.dtype)) if found else None
            for (_, tensor), found in zip(self._weights, self._types, strict=True)
        ]

    def kept(self, tensors: Iterable[torch.Tensor]) -> None:
        """The model's tensors after the load: weights that became a part of it, uncopied."""
        for tensor in tensors:
            self._note([tensor])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self._note(args)
            return 0.0 if args[0].is_floating_point() else 0
        if func is aten.copy_.default:
            self._note(args[1:2], args[0].dtype)
            return func(*args, **named) if args[0].is_meta else args[0]
        if func in (aten._to_copy.default, aten.clone.default) and args[0].is_meta:
            return self._copy(func, args[0], named)
        tensors = [each for each in tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
        if _writes(func) and not tensors[0].is_meta:
            self._note(tensors)
            return tensors[0]
        result = func(*args, **named)
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        places = {_storage(each) for each in outputs}
        if _writes(func) or not outputs:
            self._note(tensors)
        else:  # a view has the same storage
            self._note([each for each in tensors if places != {_storage(each)}])
        return result

    def _copy(self, func: Any, source: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        copy: torch.Tensor = func(source, **named | ({"device": None} if "device" in named else {}))
        number = self._numbers.get(_storage(source))
        if number is not None and copy.dtype == source.dtype:
            self._copies.append(copy)
            self._numbers[_storage(copy)] = number
        elif copy.dtype.itemsize < source.dtype.itemsize:
            self._note([source], copy.dtype)
        else:
            self._note([source])
        return copy

    def _note(self, tensors: Iterable[Any], dtype: torch.dtype | None = None) -> None:
        """These are read, and copied to `dtype`; None: used in another way."""
        for tensor in tensors:
            number = self._numbers.get(_storage(tensor))
            if number is not None:
                self._types[number].add(dtype or self._weights[number][1].dtype)


def _writes(func: Any) -> bool:
    """Whether an operation changes its first argument."""
    first = next(iter(func._schema.arguments), None)
    alias = first.alias_info if first is not None else None
    return alias is not None and alias.is_write


def _storage(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, also of one that has none."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(module: torch.nn.Module) -> Iterable[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
