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
        logits_C_V = None
        for rows in chunks:
            logits_C_V = head.logits(hidden[rows], kernel, temperature)
            normalizer[rows] = logits_C_V.logsumexp(-1)
            logp_C_V = logits_C_V - normalizer[rows, None]
            logprobs[rows] = logp_C_V.gather(-1, ids[rows, None])[:, 0]
            entropy[rows] = -_row_dot(logp_C_V.exp(), logp_C_V)
        kept = logits_C_V if len(chunks) == 1 and any(ctx.needs_input_grad) else None
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
            logp_C_V = logits_C_V - normalizer[rows, None]
            # d logp[id] = onehot − p;   d H = −p (log p + H)
            coefficient = -grad_logprobs[rows, None]
            if ctx.with_entropy:
                coefficient = coefficient - grad_entropy[rows, None] * (
                    logp_C_V + entropy[rows, None]
                )
            grad = logp_C_V.exp().mul_(coefficient)
            grad.scatter_add_(-1, ids[rows, None], grad_logprobs[rows, None])
            grad = head.grad_of_product(grad, logits_C_V, ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ kernel
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
        grads = (
            None if each is None else each.to(weight.dtype) for each in (grad_weight, grad_bias)
        )
        return grad_hidden, *grads, None, None, None, None


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`Σ_v a b` per row, without a third `C × V` tensor."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
