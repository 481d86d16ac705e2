"""Linear layers in float32 on AMD's processors with AVX-512.

PyTorch calls MKL for matrix products in float32, which uses AVX2 on these processors, half of their
width. oneDNN, which PyTorch contains as well, uses AVX-512. It generates machine code for each
shape, in 1 to 3 ms and of as many MB, so it gets blocks of tokens of one size, and MKL the rest.

Shapes: `T` tokens, `I` inputs and `O` outputs of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK_TOKENS = 512
"""Tokens of a product that oneDNN makes."""


def use_wide_products(model: nn.Module) -> None:
    """Lets the linear layers of a model use oneDNN on a CPU where that is faster."""
    if _mkl_is_narrow():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = WideLinear


@functools.cache
def _mkl_is_narrow() -> bool:
    processor = Path("/proc/cpuinfo")
    return (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor.exists()
        and "AuthenticAMD" in processor.read_text(encoding="utf-8")
    )


class WideLinear(nn.Linear):
    """A linear layer; products of float32 on a CPU are made by oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """`[…, I]` → `[…, O]`"""
        weight, bias = self.weight, self.bias
        tokens = x.numel() // x.shape[-1]
        if (
            tokens < BLOCK_TOKENS
            or x.dtype is not torch.float32
            or not x.is_cpu
            or type(weight) not in (Tensor, nn.Parameter)  # a DTensor is computed by its own rules
            or torch.is_autocast_enabled("cpu")
        ):
            return super().forward(x)
        out: Tensor = _WideProduct.apply(x.reshape(tokens, -1), weight, bias)  # type: ignore[no-untyped-call]
        return out.view(*x.shape[:-1], -1)


class _WideProduct(Function):
    """`[T, I]`, `[O, I]`, `[O]` or None → `[T, O]`"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = _by_blocks(x, weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            _by_blocks(grad, weight.t()) if for_x else None,
            _summed_over_blocks(grad, x) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


def _by_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, I]`, `[O, I]` → `[T, O]`"""
    out = x.new_empty(len(x), len(weight))
    blocks, rest = _blocks(len(x))
    for rows in blocks:
        out[rows] = _product(x[rows], weight)
    torch.mm(x[rest], weight.t(), out=out[rest])
    return out


def _summed_over_blocks(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of the weight: `[T, O]`, `[T, I]` → `[O, I]`"""
    blocks, rest = _blocks(len(x))
    total = grad[rest].t() @ x[rest]
    for rows in blocks:
        total += _product(grad[rows].t(), x[rows].t())
    return total


def _blocks(tokens: int) -> tuple[Iterator[slice], slice]:
    whole = tokens - tokens % BLOCK_TOKENS
    firsts = range(0, whole, BLOCK_TOKENS)
    return (slice(first, first + BLOCK_TOKENS) for first in firsts), slice(whole, tokens)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, I]`, `[O, I]` → `[T, O]`, by oneDNN."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out
