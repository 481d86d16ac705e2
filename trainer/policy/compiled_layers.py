"""Layers of the decoder, compiled one by one for a GPU in bfloat16.

The eager code of a layer launches a kernel for each cast, norm, rotation and activation, and keeps
the result of each for the backward pass. Invariants: a compiled layer computes the same numbers;
what it keeps are its input, products of matrices and small reductions, and the backward pass
computes again only what follows from them element by element (`KEEP_PRODUCTS`); all layers of a
kind share their graphs, at any number of tokens, and in passes without a backward pass.

Attention and Gated DeltaNet stay outside of these graphs (`outside_graphs`): they use the layout of
the row, a Python object, and have kernels of their own. They divide a layer into parts, each of
which is one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

F = TypeVar("F", bound=Callable[..., Any])

MAX_GRAPHS = 64
"""Number of graphs of a part of a layer in a process, for the kinds of layers of the policy, a
critic and teachers. After torch's own 8, further ones would run eagerly."""
KEEP_PRODUCTS = {
    "ban_recompute_materialized_backward": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_used_far_apart": False,
}
"""Settings of AOTAutograd's partitioner. By its defaults it keeps every input of a product, such as
the normed hidden states and the product of gate and activation, which follow element by element
from what is kept anyway: 74 KB a token and layer of 2,048, instead of 54."""


def compile_layers(layers: Sequence[nn.Module], backend: Any = "inductor") -> None:
    """Compiles the forward and backward passes of these layers at their first use.

    Hooks of a layer (FSDP2, gradient checkpointing) stay outside.
    """
    for layer in layers:
        layer.forward = for_all_passes(
            _patched(torch.compile(layer.forward, backend=_keeping_products(backend), dynamic=True))
        )
        layer.train().train = functools.partial(_unchanged, layer)  # type: ignore[method-assign]


def _unchanged(layer: nn.Module, _mode: bool = True) -> nn.Module:
    """A compiled layer is always in training mode: it has no noise, and would be compiled once more
    for the other."""
    return layer


def for_all_passes(compiled: F) -> F:
    """The compiled function, of which a pass without a backward pass, and one whose input has no
    gradient, use the graph of training: its inputs are made to have one."""

    @functools.wraps(compiled)
    def called(*arguments: Any, **named: Any) -> Any:
        reads = not torch.is_grad_enabled()
        token = _READS.set(reads)
        try:
            if not reads:
                return compiled(*_as_inputs(arguments), **named)
            with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                out = compiled(*_as_inputs(arguments), **named)
            return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, out)
        finally:
            _READS.reset(token)

    return cast(F, called)


def _as_inputs(values: Any) -> Any:
    """The values as a graph gets them in every pass: with gradients, and none a view, for whose
    base another graph would be compiled."""
    return tree_map(_as_input, values)


def _as_input(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if not value.requires_grad or not torch.is_grad_enabled():
        return value.detach().requires_grad_()
    return value if value._base is None else _Alone.apply(value)  # type: ignore[no-untyped-call]


class _Alone(Function):
    """The same tensor, of which autograd does not know that it is a view."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _patched(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function under the settings of dynamo that it needs."""
    # Attention is called by a function that the layer calls; without the first, both are cut.
    settings = torch._dynamo.config.patch(nested_graph_breaks=True, recompile_limit=MAX_GRAPHS)
    patched: Callable[..., Any] = settings(compiled)
    return patched


@functools.cache
def _keeping_products(backend: Any) -> Callable[..., Any]:
    """The backend, which divides graphs into a forward and a backward pass by `KEEP_PRODUCTS`. One
    object for each backend: torch compiles again for another."""
    compiler = torch._dynamo.lookup_backend(backend) if isinstance(backend, str) else backend

    def compiled(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with torch._functorch.config.patch(KEEP_PRODUCTS):
            return compiler(graph, inputs)

    return compiled


def outside_graphs(function: F) -> F:
    """The function, which compiled layers call but do not contain."""

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        reads, counting = _READS.get(), _COUNTING.get()
        if reads is not None:
            with torch.set_grad_enabled(not reads):
                return _as_inputs(function(*arguments, **named))
        if counting is None:
            return function(*arguments, **named)
        with counting.outside(arguments, named):
            return function(*arguments, **named)

    disable: Any = torch.compiler.disable
    outside: F = disable(called, reason="uses the layout of the row")
    return outside


class KeptByGraphs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Says what compiled layers keep, from an eager pass (over fake tensors).

    A tensor that autograd keeps in a layer is replaced by those from which it follows element by
    element, back to the layer's input, to products and to reductions. The partitioner minimises
    bytes over all such choices, so that it keeps no more than this one.

    Example:
        with KeptByGraphs(layers) as graphs, saved_tensors_hooks(keep, …):
            model(…)  # keep(tensor) counts graphs.sources(tensor)
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = layers
        self._inside = False
        self._origins: dict[int, list[Tensor]] = {}
        """Storage of a tensor that can be computed again → what it was computed from."""
        self._alive: list[Tensor] = []
        """All of them, so that no two storages have the same key."""
        self._hooks: list[Any] = []

    def __enter__(self) -> KeptByGraphs:
        for layer in self._layers:
            self._hooks.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._leave))
        self._token = _COUNTING.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _COUNTING.reset(self._token)
        for hook in self._hooks:
            hook.remove()

    def sources(self, tensor: Tensor) -> list[Tensor]:
        """What is kept instead of the tensor: itself, if it cannot be computed again."""
        origins = self._origins.get(_storage(tensor))
        if origins is None:
            return [tensor]
        return [source for origin in origins for source in self.sources(origin)]

    @contextmanager
    def outside(self, arguments: Any, named: Any) -> Iterator[None]:
        """What a function outside of the graphs gets, and what it computes, exists as it is."""
        inside, self._inside = self._inside, False
        self._fix((arguments, named))
        try:
            yield
        finally:
            self._inside = inside

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._inside and isinstance(out, Tensor) and _is_elementwise(func):
            inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            key = _storage(out)
            if inputs and all(_storage(each) != key for each in inputs):
                self._origins[key] = inputs
                self._alive += [out, *inputs]
        return out

    def _enter(self, _layer: nn.Module, arguments: Any, named: Any) -> None:
        self._fix((arguments, named))
        self._inside = True

    def _leave(self, *_: Any) -> None:
        self._inside = False

    def _fix(self, values: Any) -> None:
        for each in tree_leaves(values):
            if isinstance(each, Tensor):
                self._origins.pop(_storage(each), None)


_READS: ContextVar[bool | None] = ContextVar("reads", default=None)
"""Within a compiled layer, whether its pass has no backward pass."""
_COUNTING: ContextVar[KeptByGraphs | None] = ContextVar("counting", default=None)

_ALSO_ELEMENTWISE = {"_to_copy", "clone", "cat", "copy", "index", "gather"}
"""Operations without torch's tag that the partitioner computes again as it does pointwise ones: the
rows of experts are chosen from the hidden states, for example."""


def _is_elementwise(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _ALSO_ELEMENTWISE


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
