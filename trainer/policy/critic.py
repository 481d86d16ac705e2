"""The critic: a decoder with a scalar head that estimates the value of the state before a token.

Invariant: the value of a token is read at the position that predicts it, so that it does not depend
on the token. Packing, prefix sharing, sharding and the optimizer step are the same as the policy's.

Shapes: `N` trained tokens of the batch, `M` of them in a micro-batch, `D` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithms.token_loss import Metrics, ValueLossFunction
from trainer.batch import Batch, BatchPart
from trainer.errors import TrainingError
from trainer.optimizer import Stepper, Unread
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.compiled_layers import compile_layers
from trainer.policy.context_parallel import of_whole
from trainer.policy.image_reader import reader_of
from trainer.policy.late_metrics import LateMetrics
from trainer.policy.model import blocks, load_model
from trainer.policy.model_config import DTYPES, ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.policy import pack_for, parts_for
from trainer.policy.scorer import last_hidden
from trainer.rows.packing import MicroBatch
from trainer.rows.prefix_tree import in_reading_order


class ValueModel(nn.Module):
    """The decoder of a causal model and a linear head whose weights start at 0."""

    def __init__(self, model: Any, compute_dtype: torch.dtype, *, offload: bool = False) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.offload = offload
        # in the other weights' type, because FSDP2 shards them together
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """The value of each target of the micro-batch, `[M]` float32."""
        hidden = last_hidden(self.model, micro, self.compute_dtype, offload=self.offload)
        values: Tensor = self.head(hidden[micro.predictors].to(self.head.weight.dtype))
        # a sum over one element, because FSDP2 refuses a view
        return of_whole(micro, values.float().sum(-1))


class Critic:
    """Example:
    critic = Critic(ModelConfig(path=…), OptimizerConfig(lr=1e-5))
    batch.values = critic.compute_values(batch)
    algorithm.compute_advantages(batch)
    late = critic.accumulate(critic.pack(batch), batch, algorithm.value_loss(batch))
    metrics = critic.step(late)
    """

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        *,
        device: str | torch.device = "cpu",
        ranks: Ranks | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Settings of adapters and of routers are ignored: all weights of the critic but those of a
        tower are trained by its own loss, and it routes by itself."""
        ignored = {"lora": None, "router_replay": "off", "router_aux_loss": 0.0}
        if config.vision == "trained":
            ignored["vision"] = "frozen"
        self.config = config.model_copy(update=ignored)
        self.ranks = ranks or Ranks()
        self.device = torch.device(device)
        place = self.ranks.placing(DTYPES[config.compute_dtype])
        model = load_model(self.config, place=place, without_head=True)
        dtype = DTYPES[config.compute_dtype]
        self.module = ValueModel(model, dtype, offload=config.activation_offload)
        if self.ranks.mesh is None:  # else each layer is moved when it is sharded
            self.module = self.module.to(self.device)
        model.get_output_embeddings().requires_grad_(model.config.tie_word_embeddings)
        reader = reader_of(model)
        tower = None if reader is None else reader.tower
        self.ranks.shard(self.module, blocks(model), self.module.compute_dtype, tower)
        if config.compiles and self.device.type == "cuda":
            compile_layers(blocks(model))
        self.stepper = Stepper(self.module, optimizer, total_steps)

    def pack(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[MicroBatch]:
        """The batch (or some of its sequences) as micro-batches of this rank."""
        return pack_for(self.module.model, self.config, batch, sequences, in_pieces=True)

    def parts(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[BatchPart]:
        """The batch (or some of its sequences), divided into one part for each rank."""
        return parts_for(
            self.module.model, self.config, self.ranks, batch, sequences, in_pieces=True
        )

    @torch.no_grad()
    def compute_values(self, batch: Batch) -> Tensor:
        """`[N]` float32: the critic's estimate of the return from each trained token on. All ranks
        call this together, each with its own part of a batch."""
        self.module.eval()
        micros = in_reading_order(self.pack(batch))
        found = [(micro.targets, self._values(micro)) for micro in micros]
        values = torch.zeros(batch.num_tokens)
        if found:
            values[torch.cat([targets for targets, _ in found])] = torch.cat(
                [each for _, each in found]
            ).cpu()
        return values

    def accumulate(
        self, micros: Sequence[MicroBatch], batch: Batch, loss: ValueLossFunction
    ) -> LateMetrics:
        """Adds the gradient of the micro-batches' losses; returns their contributions to the
        metrics, which `step` reads."""
        late = LateMetrics()
        for micro in micros:
            if micro.reads_only:
                self.module.eval()
                with torch.no_grad():
                    self._values(micro)
                continue
            self.module.train()
            result = loss(self._values(micro), micro.targets)
            losses = result.losses.detach()
            (result.losses.sum() * self.ranks.size).backward()  # type: ignore[no-untyped-call]
            late.add(result.metrics, losses, partial(_refuse, batch, micro.targets, losses))
            if micro.piece is not None:
                micro.piece.done()
        return late

    def _values(self, micro: MicroBatch) -> Tensor:
        values: Tensor = self.module(self.ranks.context.part(micro).to(self.device))
        return values

    def step(self, late: Unread | None = None) -> Metrics:
        """Executes an optimizer step, as `Policy.step` does."""
        return self.stepper.step(late)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule, for torch's DCP."""
        return self.stepper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self.stepper.load_state_dict(state)


def _refuse(batch: Batch, targets: Tensor, losses: Tensor) -> None:
    """Raises TrainingError, which names the token of the first loss that is not finite."""
    token = int(targets[int((~torch.isfinite(losses)).nonzero()[0])])
    raise TrainingError(f"{batch.name(token)}: the critic's loss of a token is not finite")
