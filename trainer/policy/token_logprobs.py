"""Log-probabilities and entropies of given tokens from hidden states, a few rows at a time.

Invariant: values and gradients are equal to those of `log_softmax(logits / temperature)` gathered
at the tokens, over the tokens that top-k and top-p left if those are given, but only a chunk of the
`M × V` logits is in memory at any time. Logits are computed for `C` rows at a time, and again in
the backward pass unless one chunk holds all rows, as in the fused linear losses of Liger and
Unsloth. On a GPU in bfloat16, what happens between two products is compiled (`fused`): the logits
are written and read once, and not ten times.

Shapes: `M` tokens, `D` hidden size, `V` vocabulary, `C` rows of a chunk, `K` tokens that are left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 24
"""Number of logits in memory at a time: 64 MiB in float32, enough for efficient matrix products."""
MIN_ROWS = 256
"""Least number of rows of a chunk, however large the vocabulary is. Each chunk reads the whole
weight and adds to its whole gradient, which for fewer rows takes longer than the products: with
Gemma's 262,144 tokens, chunks of 64 rows took twice the time."""
MOST_ROWS = 4096
"""Most rows of a chunk on a GPU."""
GPU_SHARE = 32
"""Up to this part of a GPU, as 1 / n of its memory, chunks are larger there: few rows starve it."""
LOGIT_COPIES = 3
"""Number of float32 chunks of logits that exist at the same time in the backward pass."""
EXCLUDED = -1e9
"""The tempered logit of a token that top-k or top-p excluded. It is far below that of any other, of
which logits of -120 at a temperature of 0.01 are -12,000. Of minus infinity, its share in the
entropy would be 0 · ∞."""
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
    kept: Tensor | None = None,
    entropy_grad: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """`(log-probabilities, entropies)`, both `[M]` float32, of the tempered distribution.

    `hidden` `[M, D]` in the compute type, `ids` `[M]`. `kept` `[M, K]`: the distribution over these
    tokens, among which those of `ids` are; a row of -1: over all. The entropy has a gradient only
    with `entropy_grad` (an entropy bonus); without it the backward pass is cheaper. `fused`: by
    kernels that torch compiles at the first use.
    """
    scores = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, head.weight, head.bias, head, ids, kept, temperature, entropy_grad, fused
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
        left: Tensor | None,
        temperature: float,
        with_entropy: bool,
        fused: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, normalizer = (
            hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(3)
        )
        hidden = hidden.detach()  # whose views are those of a leaf, for the compiler
        kernel = weight.to(hidden.dtype)
        chunks = _chunks(hidden, len(weight))
        keeps = len(chunks) == 1 and any(ctx.needs_input_grad) and not fused
        kept = None
        score = compiled(_score) if fused else _score
        for rows in chunks:
            logprobs[rows], entropy[rows], normalizer[rows], kept = score(
                hidden[rows],
                kernel,
                ids[rows],
                None if left is None else left[rows],
                head,
                temperature,
                keeps,
            )
        ctx.save_for_backward(hidden, weight, ids, left, normalizer, entropy, kept)
        ctx.head, ctx.temperature, ctx.with_entropy = head, temperature, with_entropy
        ctx.fused = fused
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, left, normalizer, entropy, kept = ctx.saved_tensors
        hidden, entropy = hidden.detach(), entropy.detach()  # as in `forward`
        head: OutputLayer = ctx.head
        grad_hidden = torch.empty_like(hidden)
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        grad_bias = weight.new_zeros(len(weight), dtype=torch.float32) if trains_bias else None
        kernel = weight.to(hidden.dtype)
        gradient = compiled(_gradient) if ctx.fused else _gradient
        for rows in _chunks(hidden, len(weight)):
            grad, of_bias = gradient(
                hidden[rows],
                kernel,
                ids[rows],
                None if left is None else left[rows],
                head,
                ctx.temperature,
                normalizer[rows],
                grad_logprobs[rows],
                (entropy[rows], grad_entropy[rows]) if ctx.with_entropy else None,
                kept,
                grad_bias is not None,
            )
            if grad_bias is not None:
                grad_bias += of_bias
            grad_hidden[rows] = grad @ kernel
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[rows])
        grads = (
            None if each is None else each.to(weight.dtype) for each in (grad_weight, grad_bias)
        )
        return grad_hidden, *grads, None, None, None, None, None, None


def _score(
    hidden_C_D: Tensor,
    kernel: Tensor,
    ids_C: Tensor,
    left_C_K: Tensor | None,
    head: OutputLayer,
    temperature: float,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(log-probabilities, entropies, normalizers)` of the rows of a chunk, and its logits, if they
    are kept."""
    logits_C_V = _of_left(head.logits(hidden_C_D, kernel, temperature), left_C_K)
    normalizer_C = logits_C_V.logsumexp(-1)
    logp_C_V = _shifted(logits_C_V, -normalizer_C, in_place=not keeps)
    logprobs_C = logp_C_V.gather(-1, ids_C[:, None])[:, 0]
    entropy_C = -_row_dot(logp_C_V.exp(), logp_C_V)
    return logprobs_C, entropy_C, normalizer_C, logits_C_V if keeps else None


def _gradient(
    hidden_C_D: Tensor,
    kernel: Tensor,
    ids_C: Tensor,
    left_C_K: Tensor | None,
    head: OutputLayer,
    temperature: float,
    normalizer_C: Tensor,
    grad_logprobs_C: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    kept: Tensor | None,
    trains_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of `hidden @ weight.T` `[C, V]`, in the type of `hidden`, and that of the bias.
    `of_entropy`: the entropies and their gradients `[C]`."""
    logits_C_V = kept
    if logits_C_V is None:
        logits_C_V = _of_left(head.logits(hidden_C_D, kernel, temperature), left_C_K)
    in_place = kept is None and head.softcap is None  # else the logits are needed again
    logp_C_V = _shifted(logits_C_V, -normalizer_C, in_place=in_place)
    # d logp[id] = onehot − p;   d H = −p (log p + H)
    coefficient = -grad_logprobs_C[:, None]
    if of_entropy is not None:
        entropy_C, grad_entropy_C = of_entropy
        coefficient = coefficient - grad_entropy_C[:, None] * (logp_C_V + entropy_C[:, None])
    grad = logp_C_V.exp_().mul_(coefficient)
    if torch.compiler.is_compiling():  # in the same loop as the rest
        chosen = torch.arange(len(kernel), device=ids_C.device) == ids_C[:, None]
        grad = grad + torch.where(chosen, grad_logprobs_C[:, None], 0.0)
    else:
        grad.scatter_add_(-1, ids_C[:, None], grad_logprobs_C[:, None])
    grad = head.grad_of_product(grad, logits_C_V, temperature)
    return grad.to(hidden_C_D.dtype), grad.sum(0) if trains_bias else None


def _of_left(logits_C_V: Tensor, left_C_K: Tensor | None) -> Tensor:
    """The logits, in which those of tokens that are not left are `EXCLUDED`."""
    if left_C_K is None:
        return logits_C_V
    count, everything_C_1 = logits_C_V.shape[1], left_C_K[:, :1] < 0
    left = everything_C_1.expand(-1, count + 1).clone()
    left.scatter_(1, left_C_K.clamp(0, count), True)  # in one more column: what this model lacks
    return logits_C_V.masked_fill_(left[:, :count].logical_not(), EXCLUDED)


@functools.cache
def compiled(function: Callable[..., Any], backend: Any = "inductor") -> Callable[..., Any]:
    """`_score` or `_gradient`, compiled: one graph for any number of rows."""
    graph: Any = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
    # the temperature and the scale are floats, which would be inputs otherwise
    patched: Callable[..., Any] = torch._dynamo.config.patch(specialize_float=True)(graph)
    return patched


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
    if torch.compiler.is_compiling():
        return (a * b).sum(-1)
    return torch.bmm(a[:, None, :], b[:, :, None])[:, 0, 0]


def chunk_rows(vocabulary: int, gpu_bytes: int = 0) -> int:
    """`C`, the number of rows whose logits are in memory at a time; `gpu_bytes`: the memory of the
    GPU, 0 on a CPU."""
    least = max(MIN_ROWS, CHUNK_LOGITS // vocabulary)
    fitting = gpu_bytes // (GPU_SHARE * LOGIT_COPIES * 4 * vocabulary)
    return max(least, min(MOST_ROWS, fitting - fitting % MIN_ROWS))


def _chunks(hidden: Tensor, vocabulary: int) -> list[slice]:
    gpu_bytes = 0
    if hidden.is_cuda:
        gpu_bytes = torch.cuda.get_device_properties(hidden.device).total_memory
    rows, size = len(hidden), chunk_rows(vocabulary, gpu_bytes)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
