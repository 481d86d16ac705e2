"""What a training step needs of a model, whichever way its ranks divide it.

Implementations: `Policy` and `Critic`, which hold every layer in shards (FSDP2), and
`AutomodelPolicy`, whose ranks hold parts of matrices, layers or experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.algorithms.token_loss import LossFunction, Metrics
from trainer.batch import Batch, BatchPart
from trainer.optimizer import Stepper, Unread
from trainer.policy.late_metrics import LateMetrics
from trainer.policy.model_config import ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.scores import Scores
from trainer.rows.packing import MicroBatch


class Trainable(Protocol):
    """A model with an optimizer, whose parts of a batch all ranks train together."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def stepper(self) -> Stepper:
        """The optimizer and its schedule."""
        ...

    def pack(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[MicroBatch]:
        """The batch (or some of its sequences) as micro-batches of this rank."""
        ...

    def parts(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[BatchPart]:
        """The batch (or some of its sequences), divided into one part for each rank."""
        ...

    def step(self, late: Unread | None = None) -> Metrics:
        """Clips the gradient, updates the weights, and clears the gradient. Returns also the
        metrics of `late`, what `accumulate` has returned, which are read at the end.

        Raises GradientError if the gradient is not finite, and TrainingError, which names the
        rollout and the turn, if a loss is not; the weights are unchanged then.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule, for torch's DCP."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        ...


class TrainablePolicy(Trainable, Protocol):
    """A policy in training. All ranks call its methods together, each with its own part of a batch.

    Example:
        batch.prox_logprobs = policy.compute_logprobs(batch, temperature=1.0).logprobs
        late = policy.accumulate(policy.pack(batch), batch, loss, temperature=1.0)
        metrics = policy.step(late)
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def model(self) -> Any:
        """The Hugging Face model, or this rank's layers of it."""
        ...

    @property
    def multiplied_weights(self) -> int:
        """Number of weights of the whole model by which each token is multiplied."""
        ...

    @property
    def replays(self) -> bool:
        """Whether it replays the engine's routing."""
        ...

    def compute_logprobs(self, batch: Batch, *, temperature: float, replay: bool = True) -> Scores:
        """Log-probability and entropy of every trained token at the rollout's temperature. Without
        `replay`, the policy routes by itself."""
        ...

    def compare_routing(self, batch: Batch, *, temperature: float) -> Metrics:
        """The mean |Δ log p| to the engine with its routing and with the policy's own."""
        ...

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        batch: Batch,
        loss: LossFunction,
        *,
        temperature: float,
        entropy_grad: bool = False,
    ) -> LateMetrics:
        """Adds the gradients of the losses of all of the rank's micro-batches of an optimizer step.
        Returns their contributions to the metrics.
        """
        ...

    def named_hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` as in the checkpoint at `config.path`: weights and buffers, under its
        names; tied weights appear once."""
        ...

    def hf_shapes(self) -> list[tuple[str, Tensor]]:
        """The same without their contents (device `meta`); no other rank takes part."""
        ...

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of the LoRA adapter in PEFT's format. Raises TrainingError for a policy
        that can have none."""
        ...

    def adapters_off(self) -> AbstractContextManager[Any]:
        """A context in which the LoRA adapters are off, so that the policy has its initial weights.

        Raises TrainingError for a policy without adapters.
        """
        ...
