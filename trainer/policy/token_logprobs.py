"""Log-probabilities and entropies of given tokens from hidden states, a few rows at a time.

Invariant: values and gradients are equal to those of `log_softmax(hidden @ weight.T / temperature)`
gathered at the tokens, but only a chunk of the `M × V` logits is in memory at any time. Logits are
computed for `C` rows at a time, and again in the backward pass unless one chunk holds all rows, as
in the fused linear losses of Liger and Unsloth.

Shapes: `M` tokens, `D` hidden size, `V` vocabulary, `C` rows of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 24
"""Number of logits in memory at a time: 64 MiB in float32, enough for efficient matrix products."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """`(log-probabilities, entropies)`, both `[M]` float32, of the tempered distribution.

    `hidden` `[M, D]` in the compute type, `weight` `[V, D]`, `ids` `[M]`. The entropy has a
    gradient only with `entropy_grad` (an entropy bonus); without it the backward pass is cheaper.
    """
    scores = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids, temperature, entropy_grad
    )
    logprobs, entropy = scores
    return logprobs, entropy if entropy_grad else entropy.detach()


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalizer = (
            hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(3)
        )
        scaled, kernel = hidden / temperature, weight.to(hidden.dtype)
        chunks = _chunks(len(ids), len(weight))
        probs_C_V = None
        for rows in chunks:
            logits_C_V = (scaled[rows] @ kernel.T).float()
            normalizer[rows] = logits_C_V.logsumexp(-1)
            logp_C_V = logits_C_V.sub_(normalizer[rows, None])
            logprobs[rows] = logp_C_V.gather(-1, ids[rows, None])[:, 0]
            probs_C_V = logp_C_V.exp()
            entropy[rows] = -_row_dot(probs_C_V, logp_C_V)
        kept = probs_C_V if len(chunks) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden, weight, ids, normalizer, entropy, kept)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, ids, normalizer, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        scaled, kernel = hidden / ctx.temperature, weight.to(hidden.dtype)
        for rows in _chunks(len(ids), len(weight)):
            if kept is None:
                logits_C_V = (scaled[rows] @ kernel.T).float()
                probs = (logits_C_V - normalizer[rows, None]).exp_()
            else:
                probs = kept
            # d logp[id] = onehot − p;   d H = −p (log p + H)
            coefficient = -grad_logprobs[rows, None]
            if ctx.with_entropy:
                surprise = probs.clamp(min=torch.finfo(torch.float32).tiny).log()
                coefficient = coefficient - grad_entropy[rows, None] * (
                    surprise + entropy[rows, None]
                )
            grad = probs * coefficient
            grad.scatter_add_(-1, ids[rows, None], grad_logprobs[rows, None])
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ kernel
            grad_weight += grad.T @ scaled[rows]
        return grad_hidden / ctx.temperature, grad_weight.to(weight.dtype), None, None, None


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """`Σ_v a b` per row, without a third `C × V` tensor."""
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
