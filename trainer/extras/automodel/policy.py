"""The policy on ranks that divide the model: tensor, pipeline and expert parallelism.

Invariant: the same scores, gradients and steps as `Policy` on one rank, up to rounding. Ranks that
compute a micro-batch together get the same part of a batch and return the same metrics; the
gradient is the sum over groups (FSDP2 computes the mean, so losses are multiplied by their number).

The engine is NeMo Automodel (`divided_model.py`), the schedule of the pipeline torch's own
(`pipeline.py`). docs/notes/scale.md says why, and what is not supported.

Shapes: `N` trained tokens of the batch, `M` of them in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algorithms.token_loss import LossFunction, Metrics
from trainer.batch import Batch, BatchPart
from trainer.errors import TrainingError
from trainer.extras.automodel.divided_experts import hf_tensor
from trainer.extras.automodel.divided_model import Meshes, load_divided
from trainer.extras.automodel.pipeline import LossOf, Pipeline
from trainer.optimizer import Stepper, Unread
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.export import checkpoint_shapes, checkpoint_tensors
from trainer.policy.late_metrics import LateMetrics, summed
from trainer.policy.model_config import DTYPES, ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import pack_for, parts_for, raise_not_finite
from trainer.policy.scores import Scores
from trainer.rows.packing import MicroBatch


class AutomodelPolicy:
    """A `TrainablePolicy` on ranks that divide the model.

    Example: AutomodelPolicy(ModelConfig(path=…), OptimizerConfig(lr=1e-5), device="cpu",
        ranks=Ranks.of_process_group("cpu", Parallelism(tensor=2)))
    """

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        device: str | torch.device,
        ranks: Ranks,
        total_steps: int | None = None,
    ) -> None:
        """Without an `optimizer` the policy is frozen. All ranks call this together."""
        self.config, self.ranks, self.device = config, ranks, torch.device(device)
        meshes = Meshes.of(ranks)
        self._stages = meshes.stages
        self.model: Any = load_divided(
            config, ranks, meshes, self.device, trainable=optimizer is not None
        )
        self._dtype = DTYPES[config.compute_dtype]
        self._translate = hf_tensor if ranks.parallelism.expert > 1 else None
        clip = meshes.clip
        self._stepper = Stepper(self.model, optimizer, total_steps, clip) if optimizer else None
        shapes = checkpoint_shapes(self.model, self._translate)
        own = [(name, each.shape, each.dtype) for name, each in shapes]
        every: list[Any] = [None] * self._stages.size
        dist.all_gather_object(every, own, group=self._stages.group)
        self._shapes: list[list[tuple[str, torch.Size, torch.dtype]]] = every
        """Name, shape and type of each tensor of the checkpoint, by stage."""

    @property
    def stepper(self) -> Stepper:
        """The optimizer and its schedule. Raises TrainingError for a frozen policy."""
        if self._stepper is None:
            raise TrainingError("this policy is frozen: it was created without an optimizer")
        return self._stepper

    @property
    def multiplied_weights(self) -> int:
        """Number of weights by which each token is multiplied."""
        settings = self.model.config
        every = sum(shape.numel() for stage in self._shapes for _, shape, _ in stage)
        looked_up = (
            0 if settings.tie_word_embeddings else settings.vocab_size * settings.hidden_size
        )
        return int(every - looked_up)

    @property
    def replays(self) -> bool:
        """Always False: `model.router_replay` is refused."""
        return False

    def pack(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[MicroBatch]:
        """The batch (or some of its sequences) as micro-batches of this rank."""
        return pack_for(self.model, self.config, batch, sequences)

    def parts(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[BatchPart]:
        """The batch (or some of its sequences), divided into one part for each rank.

        Raises TrainingError as `Policy.parts`.
        """
        return parts_for(self.model, self.config, self.ranks, batch, sequences)

    @torch.no_grad()
    def compute_logprobs(self, batch: Batch, *, temperature: float, replay: bool = True) -> Scores:
        """Log-probability and entropy of every trained token at the rollout's temperature."""
        self.model.eval()
        micros = self.pack(batch)
        found = self._run(micros, batch, temperature)
        scores = torch.zeros(2, batch.num_tokens)
        for micro, each in zip(micros, found, strict=self._stages.is_last):
            scores[:, micro.targets] = each.cpu()
        logprobs, entropy = self._stages.from_last(scores)
        return Scores(logprobs, entropy)

    def compare_routing(self, batch: Batch, *, temperature: float) -> Metrics:
        """Raises TrainingError: no routing is replayed."""
        raise TrainingError("ranks that divide the model replay no routing")

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        batch: Batch,
        loss: LossFunction,
        *,
        temperature: float,
        entropy_grad: bool = False,
    ) -> LateMetrics:
        """Adds the gradients of the micro-batches' losses; returns their contributions to the
        metrics, on every stage.

        Raises TrainingError, which names the rollout and the turn, if a loss is not finite.
        """
        self.model.train()
        contributions: list[Metrics] = []

        def loss_of(scores: Tensor, micro: MicroBatch) -> Tensor:
            logprobs, entropy = scores
            result = loss(logprobs, entropy, micro.targets)
            if not torch.isfinite(result.losses).all():
                raise_not_finite(batch, micro.targets, logprobs.detach(), result.losses.detach())
            contributions.append({n: float(value.detach()) for n, value in result.metrics.items()})
            return result.losses.sum() * self.ranks.groups

        self._run(micros, batch, temperature, loss_of, entropy_grad=entropy_grad)
        return LateMetrics(self._stages.from_last(summed(contributions)))

    def step(self, late: Unread | None = None) -> Metrics:
        """Clips the gradient, updates the weights, and clears the gradient; returns also the
        metrics of `late`.

        Raises GradientError, and leaves the weights unchanged, if the gradient is not finite.
        """
        return self.stepper.step(late)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule of this rank, for torch's DCP. Raises TrainingError for a
        frozen policy."""
        return self.stepper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self.stepper.load_state_dict(state)

    def named_hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` as in the checkpoint at `config.path`, on every rank; see `Policy`."""
        for number, shapes in enumerate(self._shapes):
            if self._stages.size == 1:
                yield from self._own_tensors()
                return
            own = self._own_tensors() if number == self._stages.rank else None
            for name, shape, dtype in shapes:
                tensor = (
                    torch.empty(shape, dtype=dtype, device=self.device)
                    if own is None
                    else next(own)[1].contiguous()
                )
                dist.broadcast(tensor, group=self._stages.group, group_src=number)
                yield name, tensor

    def hf_shapes(self) -> list[tuple[str, Tensor]]:
        """The same without their contents (device `meta`); no other rank takes part."""
        return [
            (name, torch.empty(shape, dtype=dtype, device="meta"))
            for stage in self._shapes
            for name, shape, dtype in stage
        ]

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Raises TrainingError: `model.lora` is refused."""
        raise TrainingError("ranks that divide the model train no adapter")

    def adapters_off(self) -> AbstractContextManager[Any]:
        """Raises TrainingError: there are no adapters."""
        raise TrainingError("ranks that divide the model train no adapter")

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this rank's stage, whole."""
        return checkpoint_tensors(self.model, self._translate)

    def _run(
        self,
        micros: Sequence[MicroBatch],
        batch: Batch,
        temperature: float,
        loss_of: LossOf | None = None,
        *,
        entropy_grad: bool = False,
    ) -> list[Tensor]:
        """The scores of the micro-batches, on the last stage; with `loss_of`, also gradients."""
        micros = [micro.to(self.device) for micro in micros]

        def of_targets(column: Tensor | None, micro: MicroBatch) -> Tensor | None:
            return None if column is None else column[micro.targets.cpu()].to(self.device)

        arguments = [
            {
                "micro": micro,
                "ids": of_targets(batch.ids, micro),
                "kept": of_targets(batch.kept, micro),
                "temperature": temperature,
                "entropy_grad": entropy_grad,
                "compute_dtype": self._dtype,
            }
            for micro in micros
        ]
        if self._stages.size > 1:
            width = self.model.config.hidden_size
            hidden = torch.empty(width, dtype=self._dtype, device="meta")
            pipeline = Pipeline(self.model, self._stages, hidden, self.device)
            return pipeline.run(micros, arguments, loss_of)
        scores = []
        for micro, given in zip(micros, arguments, strict=True):
            output = self.model(micro.ids[None], **given)
            if loss_of is not None:
                loss_of(output, micro).backward()  # type: ignore[no-untyped-call]
            scores.append(output.detach())
        return scores
