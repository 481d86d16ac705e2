"""Log-probabilities and entropies of given tokens from hidden states, a few rows at a time.

Invariant: values and gradients are equal to those of `log_softmax(logits / temperature)` gathered
at the tokens, but only a chunk of the `M × V` logits is in memory at any time. Logits are computed
for `C` rows at a time, and again in the backward pass unless one chunk holds all rows, as in the
fused linear losses of Liger and Unsloth.

Shapes: `M` tokens, `D` hidden size, `V` vocabulary, `C` rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 24
"""Number of logits in memory at a time: 64 MiB in float32, enough for efficient matrix products."""
MIN_ROWS = 256
"""Least number of rows of a chunk, however large the vocabulary is. Each chunk reads the whole
weight and adds to its whole gradient, which for fewer rows takes longer than the products: with
Gemma's 262,144 tokens, chunks of 64 rows took twice the time."""
BLOCK_PRODUCTS = 1 << 24
"""Numbers of the weight's gradient that are converted at a time, if the compute type is lower."""


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """How a model computes its logits: `cap · tanh(scale · (hidden @ weight.T + bias) / cap)`.

    Example: OutputLayer(weight, softcap=30.0)  # Gemma 2
    """

    weight: Tensor
    """`[V, D]`"""
    bias: Tensor | None = None
    """`[V]`, for models whose output layer has a bias, such as Phi."""
    scale: float = 1.0
    """Factor of the logits, for Cohere (`logit_scale`) and Granite (`logits_scaling`)."""
    softcap: float | None = None
    """Bound of the logits (Gemma 2, arXiv 2408.00118, section 2)."""

    def logits(self, hidden_C_D: Tensor, kernel: Tensor, temperature: float) -> Tensor:
        """`[C, V]` float32, tempered; `kernel` is the weight in the type of `hidden_C_D`."""
        logits_C_V = (hidden_C_D @ kernel.T).float()
        if self.bias is not None:
            logits_C_V += self.bias.float()
        if self.softcap is None:
            return logits_C_V.mul_(self.scale / temperature)
        return logits_C_V.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / temperature)

    def grad_of_product(self, grad_C_V: Tensor, logits_C_V: Tensor, temperature: float) -> Tensor:
        """The gradient of `hidden @ weight.T + bias`, in place, from that of the tempered logits.

        `d/dx cap · tanh(x / cap) = 1 − (logit / cap)²`.
        """
        if self.softcap is not None:
            grad_C_V *= 1 - (logits_C_V * (temperature / self.softcap)).square_()
        return grad_C_V.mul_(self.scale / temperature)


def token_logprobs(
    hidden: Tensor,
    head: OutputLayer,
    ids: Tensor,
    temperature: float,
    *,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """`(log-probabilities, entropies)`, both `[M]` float32, of the tempered distribution.

    `hidden` `[M, D]` in the compute type, `ids` `[M]`. The entropy has a gradient only with
    `entropy_grad` (an entropy bonus); without it the backward pass is cheaper.
    """
    scores = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head, ids, temperature, entropy_grad
    )
    logprobs, entropy = scores
    return logprobs, entropy if entropy_grad else entropy.detach()


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputLayer,
        ids: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalizer = (
            hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(3)
        )
        kernel = weight.to(hidden.dtype)
        chunks = _chunks(len(ids), len(weight))
        keeps = len(chunks) == 1 and any(ctx.needs_input_grad)
        kept = None
        for rows in chunks:
            logits_C_V = head.logits(hidden[rows], kernel, temperature)
            normalizer[rows] = logits_C_V.logsumexp(-1)
            kept = logits_C_V if keeps else None
            logp_C_V = _shifted(logits_C_V, -normalizer[rows], in_place=not keeps)
            logprobs[rows] = logp_C_V.gather(-1, ids[rows, None])[:, 0]
            entropy[rows] = -_row_dot(logp_C_V.exp(), logp_C_V)
        ctx.save_for_backward(hidden, weight, ids, normalizer, entropy, kept)
        ctx.head, ctx.temperature, ctx.with_entropy = head, temperature, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, normalizer, entropy, kept = ctx.saved_tensors
        head: OutputLayer = ctx.head
        grad_hidden = torch.empty_like(hidden)
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        grad_bias = weight.new_zeros(len(weight), dtype=torch.float32) if trains_bias else None
        kernel = weight.to(hidden.dtype)
        for rows in _chunks(len(ids), len(weight)):
            logits_C_V = kept
            if logits_C_V is None:
                logits_C_V = head.logits(hidden[rows], kernel, ctx.temperature)
            in_place = kept is None and head.softcap is None  # else the logits are needed again
            logp_C_V = _shifted(logits_C_V, -normalizer[rows], in_place=in_place)
            # d logp[id] = onehot − p;   d H = −p (log p + H)
            coefficient = -grad_logprobs[rows, None]
            if ctx.with_entropy:
                coefficient = coefficient - grad_entropy[rows, None] * (
                    logp_C_V + entropy[rows, None]
                )
            grad = logp_C_V.exp_().mul_(coefficient)
            grad.scatter_add_(-1, ids[rows, None], grad_logprobs[rows, None])
            grad = head.grad_of_product(grad, logits_C_V, ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ kernel
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[rows])
        grads = (
            None if each is None else each.to(weight.dtype) for each in (grad_weight, grad_bias)
        )
        return grad_hidden, *grads, None, None, None, None


def _add_product(sum_V_D: Tensor, grad_C_V: Tensor, hidden_C_D: Tensor) -> None:
    """`sum += grad.T @ hidden`. A product in a lower type is computed and converted for a part of
    the vocabulary at a time; torch would write all of it twice."""
    if hidden_C_D.dtype == sum_V_D.dtype:
        sum_V_D.addmm_(grad_C_V.T, hidden_C_D)
        return
    size = max(1, BLOCK_PRODUCTS // sum_V_D.shape[1])
    for start in range(0, len(sum_V_D), size):
        block = slice(start, start + size)
        sum_V_D[block] += grad_C_V[:, block].T @ hidden_C_D


def _shifted(logits_C_V: Tensor, by_C: Tensor, *, in_place: bool) -> Tensor:
    return logits_C_V.add_(by_C[:, None]) if in_place else logits_C_V + by_C[:, None]


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`Σ_v a b` per row, without a third `C × V` tensor."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def chunk_rows(vocabulary: int) -> int:
    """`C`, the number of rows whose logits are in memory at a time."""
    return max(MIN_ROWS, CHUNK_LOGITS // vocabulary)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = chunk_rows(vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
