"""What a step did, as hashes: the tokens of each turn, the gradients, the weights after it.

Invariant: two steps with equal evidence trained the same tokens, with the same advantages, to the
same weights, bit for bit. All hashes are SHA-256.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.batch import Batch
from trainer.learning.learner import Learner
from trainer.learning.policies import Learners
from trainer.policy.repeatable import order_of_sums
from trainer.weight_sync.segment import Named

TOKEN = np.dtype(
    [
        ("position", "<i4"),
        ("id", "<i4"),
        ("logprob", "<f4"),
        ("version", "<i4"),
        ("advantage", "<f4"),
        ("trained", "?"),
    ]
)
"""What is hashed of each token of a turn, in the order of positions. `logprob` is the recorded one;
`trained` is False where the algorithm leaves its rollout out, because its reward is compared with
equal ones."""

Turns = Mapping[str, list[dict[str, Any]]]
"""Trial → its turns: `turn`, `tokens`, `trained` (number of them), `versions` and `advantages` (the
least and the greatest), `tokens_hash`, and, if the trainer scores before the update, `own_hash`, of
its own log-probabilities."""


@dataclass(frozen=True, slots=True)
class PolicyEvidence:
    """What the step did to one policy."""

    turns: Turns
    gradients: list[str]
    """Hash of the clipped gradient of each optimizer step, on rank 0."""
    weights: str
    """Hash of the weights after the step, or of the adapter, if that is what is trained."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Example: Evidence({"": PolicyEvidence({…}, […], "1f3a…")}, "in one order")"""

    policies: Mapping[str, PolicyEvidence]
    """By name; that of a single policy is ""."""
    sums: str
    """As `trainer.policy.repeatable.order_of_sums`, of rank 0."""


class Witness:
    """Watches one step. Example:
    witness = Witness(learners)
    ...                                # trains
    witness.trained("", learner, batch)
    evidence = witness.evidence()
    """

    def __init__(self, learners: Learners) -> None:
        self._learners = learners.trained
        self._seen = {name: _Seen() for name in self._learners}
        self._hooks = [
            learner.models.policy.stepper.optimizer.register_step_pre_hook(
                self._seen[name].gradient
            )
            for name, learner in self._learners.items()
        ]

    def trained(self, name: str, learner: Learner, batch: Batch) -> None:
        """The policy has trained on the batch, which has its advantages."""
        sequences = learner.algorithm.trained_sequences(batch)
        self._seen[name].turns = turns_of(batch, sequences)

    def evidence(self) -> Evidence:
        """Ends watching. To be called once."""
        for hook in self._hooks:
            hook.remove()
        policies = {
            name: PolicyEvidence(seen.turns, seen.gradients, weights_hash(self._learners[name]))
            for name, seen in self._seen.items()
        }
        return Evidence(policies, order_of_sums())


@dataclass(slots=True)
class _Seen:
    turns: Turns = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)

    def gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before each optimizer step."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        hashed = hashlib.sha256()
        for weight in weights:
            if weight.grad is not None:
                _add(hashed, weight.grad)
        self.gradients.append(hashed.hexdigest())


def turns_of(batch: Batch, trained_sequences: Tensor) -> dict[str, list[dict[str, Any]]]:
    """The turns of a batch that has advantages; the algorithm trains these sequences."""
    rollout, turn = batch.rollout.numpy(), batch.turns.numpy()
    order = np.lexsort((batch.position.numpy(), turn, rollout))
    tokens = np.empty(len(order), TOKEN)
    columns = {
        "position": batch.position,
        "id": batch.ids,
        "logprob": batch.logprobs,
        "version": batch.versions,
        "advantage": batch.advantages,
        "trained": torch.isin(batch.sequence, trained_sequences),
    }
    for name, column in columns.items():
        tokens[name] = 0 if column is None else column.numpy()[order]
    own = None if batch.prox_logprobs is None else batch.prox_logprobs.numpy()[order]
    found: dict[str, list[dict[str, Any]]] = {trial: [] for trial in batch.trial_ids}
    for start, end in _runs(rollout[order], turn[order]):
        part = tokens[start:end]
        line = {
            "turn": int(turn[order[start]]),
            "tokens": end - start,
            "trained": int(part["trained"].sum()),
            "versions": [int(part["version"].min()), int(part["version"].max())],
            "advantages": [float(part["advantage"].min()), float(part["advantage"].max())],
            "tokens_hash": hashlib.sha256(part.tobytes()).hexdigest(),
        }
        if own is not None:
            line["own_hash"] = hashlib.sha256(own[start:end].tobytes()).hexdigest()
        found[batch.trial_ids[int(rollout[order[start]])]].append(line)
    return found


def weights_hash(learner: Learner) -> str:
    """Hash of the lines `NAME TYPE SHAPE HASH` of all weights, sorted by name."""
    lora = learner.models.policy.config.lora
    gathered = learner.models.weights() if lora is None else learner.models.adapter()
    with closing(gathered) as named:
        return named_hash(named)


def named_hash(named: Iterable[Named]) -> str:
    """As `weights_hash`, of these tensors."""
    lines = []
    for name, tensor in named:
        hashed = hashlib.sha256()
        _add(hashed, tensor)
        shape = "x".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"{name} {dtype} {shape} {hashed.hexdigest()}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _add(hashed: Any, tensor: Tensor) -> None:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = own.detach().cpu().contiguous().reshape(-1)
    hashed.update(flat.view(torch.uint8).numpy())


def _runs(*keys: Any) -> Iterator[tuple[int, int]]:
    """The ranges in which all keys stay the same."""
    size = len(keys[0])
    changes = np.zeros(size, bool)
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    starts = [*([0] if size else []), *np.flatnonzero(changes).tolist()]
    yield from zip(starts, [*starts[1:], size], strict=True)
