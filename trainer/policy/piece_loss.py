"""The loss of a micro-batch whose sequences have trained tokens in other passes, too.

A loss may need all trained tokens of a sequence (a ratio per sequence). Those of other passes, the
companions, are known when a pass is trained: earlier tokens of the sequence have been read, and
later ones have been trained. Invariant: the gradient of each token's log-probability is that of the
sum of all losses of its sequence, and each token counts once in the metrics, when the last pass of
its sequence is trained.

Shapes: `M` tokens of a micro-batch, `C` companions, `N` trained tokens of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithms.token_loss import LossFunction, TokenLoss
from trainer.policy.scorer import Scored
from trainer.rows.kept import Piece
from trainer.rows.packing import MicroBatch
from trainer.transfers import sent


@dataclass(frozen=True, slots=True, eq=False)
class MicroLoss:
    """The losses of a micro-batch's tokens and their companions."""

    targets: Tensor
    """`[M + C]` int64, indices of the batch's trained tokens; ascending."""
    logprobs: Tensor
    """`[M + C]`, without a graph."""
    loss: TokenLoss
    """The losses of these tokens; the metrics of those that are finished."""


def loss_of(micro: MicroBatch, scored: Scored, loss: LossFunction) -> MicroLoss:
    """The loss of the micro-batch with these scores."""
    piece = micro.piece
    logprobs, entropy = scored.logprobs, scored.entropy
    if piece is None:
        return MicroLoss(micro.targets, logprobs.detach(), loss(logprobs, entropy, micro.targets))
    note(piece, micro.targets, scored)
    targets, order = torch.cat([micro.targets, piece.companions]).sort()
    names = {"logprobs": logprobs, "entropy": entropy}
    all_logprobs, all_entropy = (
        torch.cat([own, _known(piece, name, piece.companions)])[sent(order, own.device)]
        for name, own in names.items()
    )
    result = loss(all_logprobs, all_entropy, targets)
    if not torch.equal(piece.finished, targets):
        with torch.no_grad():
            known, known_entropy = (_known(piece, name, piece.finished) for name in names)
            metrics = loss(known, known_entropy, piece.finished).metrics
            result = replace(result, metrics=metrics)
    return MicroLoss(targets, all_logprobs.detach(), result)


def note(piece: Piece, targets: Tensor, scored: Scored) -> None:
    """Notes the scores of these trained tokens for other passes over the tree."""
    for name, own in (("logprobs", scored.logprobs), ("entropy", scored.entropy)):
        known = piece.kept.scores.get(name)
        size = 1 + int(targets.max()) if len(targets) else 0
        if known is None or len(known) < size:
            longer = own.new_zeros(size)
            if known is not None:
                longer[: len(known)] = known
            piece.kept.scores[name] = known = longer
        known[sent(targets, own.device)] = own.detach()


def _known(piece: Piece, name: str, targets: Tensor) -> Tensor:
    known = piece.kept.scores[name]
    return known[sent(targets, known.device)]
