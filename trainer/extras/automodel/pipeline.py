"""Layers divided among stages, through which micro-batches of different lengths pass.

Invariant: the stages together compute what the whole model computes. Each has the names of its
weights in the whole model, so that checkpoints and exports need no renaming.

Shapes: `T` tokens of a micro-batch, `D` hidden size, `M` tokens whose scores are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from trainer.rows.packing import MicroBatch

LossOf = Callable[[Tensor, MicroBatch], Tensor]
"""The loss of a micro-batch from its scores `[2, M]`: log-probabilities and entropies."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The ranks among which the layers are divided; `Stages()` is a single rank.

    Example: Stages(size=2, rank=1, group=…)  # the second half of the layers
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def keep(self, model: Any) -> None:
        """Removes the layers of the other stages from a Hugging Face model."""
        decoder = model.get_decoder()
        count = len(decoder.layers)
        for index in range(count):
            if index * self.size // count != self.rank:
                decoder.layers[index] = Absent()
        if not self.is_first:
            decoder.embed_tokens = None
        if not self.is_last:
            decoder.norm, model.lm_head = Absent(), None

    def from_last(self, value: Any) -> Any:
        """The last stage's value, on every stage. All stages call this together."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=self.size - 1)
        return values[0]


class Absent(nn.Module):
    """A layer that another stage has."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One stage's layers, and the stages with which it computes."""

    module: nn.Module
    """Takes the ids `[1, T]` on the first stage and hidden states `[1, T, D]` on the others;
    returns the scores `[2, M]` on the last stage and hidden states on the others."""
    stages: Stages
    hidden: Tensor
    """A hidden state, `[D]`, on the device `meta`."""
    device: torch.device

    def run(
        self,
        micros: Sequence[MicroBatch],
        arguments: Sequence[dict[str, Any]],
        loss_of: LossOf | None = None,
    ) -> list[Tensor]:
        """Computes the micro-batches, and with `loss_of` the gradients of their losses. Returns the
        scores of each on the last stage, without gradients; nothing on the others."""
        stage = self._stage(micros)
        with_loss = loss_of is not None
        # 1F1B keeps the activations of fewer micro-batches, but needs one for each stage
        fits = with_loss and len(micros) >= self.stages.size
        schedule = (Schedule1F1B if fits else ScheduleGPipe)(
            stage, len(micros), loss_fn=loss_of, scale_grads=False
        )
        stage.has_backward = with_loss
        stage.clear_runtime_states()
        first, last = self.stages.is_first, self.stages.is_last
        scores: list[Tensor] = []

        def keep_scores(_module: nn.Module, _given: Any, output: Tensor) -> None:
            scores.append(output.detach())

        hook = self.module.register_forward_hook(keep_scores) if last else None
        try:
            schedule._step_microbatches(
                [(micro.ids[None],) for micro in micros] if first else [()] * len(micros),
                list(arguments),
                list(micros) if last and with_loss else None,
                [] if last and with_loss else None,
                return_outputs=False,
            )
        finally:
            if hook is not None:
                hook.remove()
        return scores

    def _stage(self, micros: Sequence[MicroBatch]) -> RaggedStage:
        lengths = [len(micro.ids) for micro in micros]
        longest, size = max(lengths), self.hidden.shape[0]
        hidden = self.hidden.new_empty(1, longest, size).requires_grad_()
        ids = torch.empty(1, longest, dtype=torch.int64, device="meta")
        scores = torch.empty(2, longest, device="meta", requires_grad=True)
        stage = RaggedStage(
            self.module,
            self.stages.rank,
            self.stages.size,
            self.device,
            input_args=ids if self.stages.is_first else hidden,
            output_args=scores if self.stages.is_last else hidden,
            group=self.stages.group,
        )
        stage.lengths = lengths
        return stage


class RaggedStage(PipelineStage):
    """A stage whose micro-batches have different lengths: torch's stage receives all of them in
    buffers of one shape."""

    lengths: Sequence[int] = ()

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._fit(self.args_recv_info)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._fit(self.grad_recv_info)

    def _fit(self, received: dict[int, Any]) -> None:
        for chunk, infos in received.items():
            for info in infos:
                if info.buffer is not None:
                    shape = (1, self.lengths[chunk], info.buffer.shape[-1])
                    grad = info.buffer.requires_grad
                    info.buffer = info.buffer.new_empty(shape).requires_grad_(grad)
