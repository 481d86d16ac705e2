"""Log-probabilities and entropies from logits whose vocabulary is divided among ranks.

Invariant: values and gradients are those of `token_logprobs` on the whole logits, but each rank
holds only the logits of its own part of the vocabulary; ranks exchange four numbers per token. As
in Megatron-LM's vocabulary-parallel cross-entropy (arXiv 1909.08053, section 3).

Shapes: `M` tokens, `V` vocabulary, `v` tokens of the vocabulary that this rank holds, `K` tokens
that are left.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.policy.token_logprobs import EXCLUDED


def divided_logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    *,
    kept: Tensor | None = None,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """`(log-probabilities, entropies)` of the tokens `ids` `[M]`, both `[M]` float32, of the
    tempered distribution. `logits` are `[M, V]`: a tensor, or a DTensor whose last dimension may be
    sharded in equal parts. `kept` `[M, K]`: the distribution over these tokens, as in
    `token_logprobs`. The entropy has a gradient only with `entropy_grad`."""
    group, first = None, 0
    if isinstance(logits, DTensor):
        if logits.placements == (Shard(logits.ndim - 1),):
            group = logits.device_mesh.get_group()
            first = logits.shape[-1] // dist.get_world_size(group) * dist.get_rank(group)
        else:
            logits = logits.redistribute(placements=[Replicate()])
        logits = logits.to_local()
    logprobs, entropy = _DividedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, ids, kept, temperature, first, group, entropy_grad
    )
    return logprobs, entropy if entropy_grad else entropy.detach()


class _DividedLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_M_v: Tensor,
        ids: Tensor,
        kept: Tensor | None,
        temperature: float,
        first: int,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled_M_v = _of_left(logits_M_v.float() / temperature, kept, first)
        highest = scaled_M_v.amax(-1)
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        shifted_M_v = scaled_M_v.sub_(highest[:, None])
        own, at = _own(ids, first, shifted_M_v.shape[-1])
        target = shifted_M_v.gather(-1, at[:, None])[:, 0] * own
        weights_M_v = shifted_M_v.exp()
        sums = torch.stack((weights_M_v.sum(-1), (weights_M_v * shifted_M_v).sum(-1), target))
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, weighted, target = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits_M_v, ids, kept, highest + log_total, entropy)
        ctx.temperature, ctx.first, ctx.with_entropy = temperature, first, with_entropy
        return target - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits_M_v, ids, kept, normalizer, entropy = ctx.saved_tensors
        scaled_M_v = _of_left(logits_M_v.float() / ctx.temperature, kept, ctx.first)
        logp_M_v = scaled_M_v.sub_(normalizer[:, None])
        # d logp[id] = onehot − p;   d H = −p (log p + H)
        coefficient = -grad_logprobs[:, None]
        if ctx.with_entropy:
            coefficient = coefficient - grad_entropy[:, None] * (logp_M_v + entropy[:, None])
        grad_M_v = logp_M_v.exp_().mul_(coefficient)
        own, at = _own(ids, ctx.first, grad_M_v.shape[-1])
        grad_M_v.scatter_add_(-1, at[:, None], (grad_logprobs * own)[:, None])
        grad_M_v /= ctx.temperature
        return grad_M_v.to(logits_M_v.dtype), None, None, None, None, None, None


def _of_left(scaled_M_v: Tensor, kept_M_K: Tensor | None, first: int) -> Tensor:
    """The logits, in which those of tokens that are not left are `EXCLUDED`, in place."""
    if kept_M_K is None:
        return scaled_M_v
    count = scaled_M_v.shape[-1]
    own, at = _own(kept_M_K, first, count)
    left = (kept_M_K[:, :1] < 0).expand(-1, count + 1).clone()
    left.scatter_(1, torch.where(own, at, count), True)  # the others' tokens in one more column
    return scaled_M_v.masked_fill_(left[:, :-1].logical_not(), EXCLUDED)


def _own(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Whether each token is in this rank's part of the vocabulary, and where (0 if it is not)."""
    own = (ids >= first) & (ids < first + count)
    return own, torch.where(own, ids - first, 0)
