"""fla's own kernels of the gated delta rule, run by Triton's interpreter on a CPU, compared with
transformers' functions and with the memory that `delta_memory` expects. Prints JSON.

Two things are replaced, because the interpreter lacks them: the tuner of kernels, which needs a
GPU's clock, takes its first choice; and a loop's counter is a tensor, as in a compiled kernel.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton.language as tl
from fla.ops.common import chunk_delta_h
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
from triton.runtime.autotuner import Autotuner

from trainer.extras.hybrids import delta_memory, delta_rule
from trainer.rows.packing import Layout

HEADS, KEYS, VALUES = 2, 16, 32


def first_choice(tuner: Any, *args: Any, **options: Any) -> Any:
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    return tuner.fn.run(*args, **options | tuner.configs[0].all_kwargs())


def counted(*bounds: Any) -> Iterator[Any]:
    return (tl.full([], at, tl.int64) for at in builtins.range(*(int(each) for each in bounds)))


def row(tokens: int) -> list[Tensor]:
    """Queries, keys, values, decays and betas."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(1))
    query, key = draw(2, 1, tokens, HEADS, KEYS)
    value = draw(1, tokens, HEADS, VALUES)
    decay, beta = draw(2, 1, tokens, HEADS)
    given = [query, key, value, -torch.nn.functional.softplus(decay), beta.sigmoid()]
    return [each.clone().requires_grad_() for each in given]


def on_a_tree() -> Mapping[str, float]:
    """The largest difference of outputs and gradients, relative to the largest value."""
    ends = torch.full((300,), 300)
    ends[100:170], ends[230:260] = 170, 260
    layout = Layout(ends, longest=300)
    assert layout.parent_runs == (None, 0, 0, 2, 2)
    weights = torch.randn(1, 300, HEADS, VALUES, generator=torch.Generator().manual_seed(2))
    slow = functools.partial(delta_rule._each, inspect.unwrap(torch_chunk_gated_delta_rule))
    found: list[list[Tensor]] = []
    for many in (slow, delta_rule.fla_rule):
        given = row(300)
        query, key, value, g, beta = given
        out = delta_rule.over_levels(
            many, query, key, value, g=g, beta=beta, layout=layout, use_qk_l2norm_in_kernel=True
        )
        found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), given)])
    names = ("outputs", "query", "key", "value", "g", "beta")
    return {
        name: float((one - other).abs().max() / one.abs().max())
        for name, one, other in zip(names, *found, strict=True)
    }


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that were made and still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.size = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and "empty" in str(func):
                self.size += tensor.nbytes
                weakref.finalize(tensor, self._freed, tensor.nbytes)
        self.peak = max(self.peak, self.size)
        return out

    def _freed(self, size: int) -> None:
        self.size -= size


def memory() -> Mapping[str, int]:
    """Bytes that the kernel keeps, and that its backward pass makes, beside the expected ones."""
    query, key, value, g, beta = row(192)
    bounds = [0, 70, 192]
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes if tensor.is_floating_point() else 0)
        return tensor

    def run(rule: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        kept.clear()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            return rule(
                query, key, value, g=g, beta=beta, initial_state=None, output_final_state=True,
                use_qk_l2norm_in_kernel=True, bounds=bounds,
            )  # fmt: skip

    shapes = delta_memory.KernelShapes()
    run(shapes)
    expected = sum(kept)
    outputs = run(delta_rule.fla_rule)
    with Allocated() as allocated:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return {
        "kept": sum(kept),
        "kept, expected": expected,
        "backward": allocated.peak,
        "backward, expected": delta_memory._backward_bytes(key, value, bounds),
    }


Autotuner.run = first_choice
chunk_delta_h.range = counted
print(json.dumps({"tree": on_a_tree(), "memory": memory()}))
