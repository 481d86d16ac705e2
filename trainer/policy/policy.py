"""The policy in training: scores of recorded tokens, gradients of a loss, and the optimizer step.

Invariant: the gradient of a step is the gradient of the sum of the losses of all its tokens. The
weights of tokens have denominators for the whole batch, so that cutting the batch into
micro-batches, or dividing it among ranks, changes only the rounding. The auxiliary loss of routers
(`model.router_aux_loss`) is the exception: it balances each micro-batch.

Shapes: `N` trained tokens of the batch, `M` of them in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from proxy.settings.late_section import load_extra
from trainer.algorithms.token_loss import LossFunction, Metrics
from trainer.batch import Batch, BatchPart, RowPlan, part_in_micro_batches
from trainer.errors import TrainingError
from trainer.optimizer import Stepper, Unread
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.adapter import adapter_tensors, share_frozen_weights
from trainer.policy.compiled_layers import compile_layers
from trainer.policy.export import check_names, checkpoint_shapes, checkpoint_tensors
from trainer.policy.flops import multiplied_weights
from trainer.policy.image_reader import check_batch, positions_of, reader_of, with_masks
from trainer.policy.late_metrics import LateMetrics
from trainer.policy.model import blocks, context_tokens, load_model, pieces_problem, vocabulary
from trainer.policy.model_config import DTYPES, ModelConfig
from trainer.policy.parallel import Ranks
from trainer.policy.piece_loss import loss_of, note
from trainer.policy.scorer import BalanceLoss, CausalScorer, Scored
from trainer.policy.scores import Scores, collected
from trainer.policy.trainable import TrainablePolicy
from trainer.rows.packing import MicroBatch
from trainer.rows.prefix_tree import divide, in_reading_order, lay_out
from trainer.transfers import sent

CPU_FILL_TOKENS = 4096
"""Number of tokens up to which a CPU combines sequences into a pass. Products that fit into the
cache are faster: a matrix product of 4,096 rows of 128 ran at 83 GFLOP/s, one of 22,725 rows at 59.
A small pass also needs less memory."""


class Policy:
    """A Hugging Face causal model with its optimizer; a `TrainablePolicy`.

    Example:
        policy = Policy(ModelConfig(path=…), OptimizerConfig(lr=1e-5))
        batch.prox_logprobs = policy.compute_logprobs(batch, temperature=1.0).logprobs
        late = policy.accumulate(policy.pack(batch), batch, loss, temperature=1.0)
        metrics = policy.step(late)
    """

    def __init__(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        device: str | torch.device = "cpu",
        ranks: Ranks | None = None,
        total_steps: int | None = None,
        weights_of: TrainablePolicy | None = None,
    ) -> None:
        """Without an `optimizer` the policy is frozen, like a reference or a teacher. A policy with
        a LoRA adapter shares the frozen weights of `weights_of`, another one on the same
        checkpoint."""
        self.config = config
        self.ranks = ranks or Ranks()
        self.device = torch.device(device)
        place = self.ranks.placing(DTYPES[config.compute_dtype])
        self.model: Any = load_model(config, trainable=optimizer is not None, place=place)
        if optimizer is not None:
            check_names(self.model, config.path)
        if weights_of is not None:
            share_frozen_weights(self.model, weights_of.model)
        if self.ranks.mesh is None:  # else each layer is moved when it is sharded
            self.model = self.model.to(self.device)
        balance: BalanceLoss | None = None
        if optimizer and config.router_aux_loss:
            balance = load_extra("trainer.extras.experts.router_balance:RouterBalance.of")(
                self.model
            )
        offload = config.activation_offload and optimizer is not None
        dtype = DTYPES[config.compute_dtype]
        fused = config.compiles and self.device.type == "cuda"
        self.scorer = CausalScorer(self.model, dtype, balance=balance, offload=offload, fused=fused)
        reader = reader_of(self.model)
        tower = None if reader is None else reader.tower
        self.ranks.shard(self.scorer, blocks(self.model), self.scorer.compute_dtype, tower)
        if fused:
            compile_layers(blocks(self.model))
        tower_trained = reader is not None and reader.trained
        self._stepper = (
            Stepper(self.scorer, optimizer, total_steps, saves_names=tower_trained)
            if optimizer
            else None
        )

    @property
    def stepper(self) -> Stepper:
        """The optimizer and its schedule. Raises TrainingError for a frozen policy."""
        if self._stepper is None:
            raise TrainingError("this policy is frozen: it was created without an optimizer")
        return self._stepper

    def pack(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[MicroBatch]:
        """The batch (or some of its sequences) as micro-batches of this rank.

        Raises TrainingError as `parts`, which has checked a rank's own part of a batch.
        """
        if self.replays and not batch.micro_batches:
            load_extra("trainer.extras.experts.router_replay:check_rows")(self.model, batch)
        return pack_for(self.model, self.config, batch, sequences, in_pieces=True)

    def parts(self, batch: Batch, sequences: Iterable[int] | None = None) -> list[BatchPart]:
        """The batch (or some of its sequences), divided into one part for each rank.

        Raises TrainingError for a rollout longer than the model's context, or with the routed
        experts of another model.
        """
        if self.replays:
            load_extra("trainer.extras.experts.router_replay:check_rows")(self.model, batch)
        return parts_for(self.model, self.config, self.ranks, batch, sequences, in_pieces=True)

    @property
    def replays(self) -> bool:
        """Whether it replays the engine's routing; only a policy in training does."""
        return self.config.router_replay == "replay" and self._stepper is not None

    @property
    def multiplied_weights(self) -> int:
        """Number of weights by which each token is multiplied."""
        return multiplied_weights(self.model)

    @torch.no_grad()
    def compute_logprobs(self, batch: Batch, *, temperature: float, replay: bool = True) -> Scores:
        """Log-probability and entropy of every trained token at the rollout's temperature. Without
        `replay`, the policy routes by itself.

        All ranks call this together, each with its own part of a batch.
        """
        self.scorer.eval()
        found = []
        for micro in in_reading_order(self.pack(batch)):
            micro = micro if replay else replace(micro, experts=None)
            scored = self._score(micro, batch, temperature, entropy_grad=False)
            found.append((micro.targets, scored.logprobs, scored.entropy))
        return collected(found, batch.num_tokens)

    @torch.no_grad()
    def compare_routing(self, batch: Batch, *, temperature: float) -> Metrics:
        """The mean |Δ log p| to the engine on the tokens of each rank's first micro-batch, with the
        engine's routing and with the policy's own."""
        self.scorer.eval()
        sums = {"tokens": 0.0, "replayed": 0.0, "routed": 0.0}
        for name in ("replayed", "routed"):
            for micro in islice(in_reading_order(self.pack(batch)), 1):
                way = micro if name == "replayed" else replace(micro, experts=None)
                scored = self._score(way, batch, temperature, entropy_grad=False)
                recorded = batch.logprobs[micro.targets]
                sums[name] += float((scored.logprobs.cpu() - recorded).abs().double().sum())
                sums["tokens"] += len(micro.targets) * (name == "replayed")
        sums = self.ranks.sum_metrics(sums)
        if not sums["tokens"]:
            return {}
        return {
            "mismatch/with_replay_abs_mean": sums["replayed"] / sums["tokens"],
            "mismatch/without_replay_abs_mean": sums["routed"] / sums["tokens"],
        }

    def accumulate(
        self,
        micros: Sequence[MicroBatch],
        batch: Batch,
        loss: LossFunction,
        *,
        temperature: float,
        entropy_grad: bool = False,
    ) -> LateMetrics:
        """`forward_backward` of each micro-batch; returns their contributions, which `step`
        reads."""
        late = LateMetrics()
        for micro in micros:
            self._backward(micro, batch, loss, temperature, entropy_grad, late)
        return late

    def forward_backward(
        self,
        micro: MicroBatch,
        batch: Batch,
        loss: LossFunction,
        *,
        temperature: float,
        entropy_grad: bool = False,
    ) -> Metrics:
        """Adds the gradient of the micro-batch's losses; returns its contributions to the metrics.
        The micro-batches of a tree in pieces must come in the order in which `pack` gives them.

        Raises TrainingError, which names the rollout and the turn, if a loss is not finite.
        """
        late = LateMetrics()
        self._backward(micro, batch, loss, temperature, entropy_grad, late)
        return late.sums()

    def _backward(
        self,
        micro: MicroBatch,
        batch: Batch,
        loss: LossFunction,
        temperature: float,
        entropy_grad: bool,
        late: LateMetrics,
    ) -> None:
        if micro.reads_only:
            self._read(micro, batch, temperature)
            return
        self.scorer.train()
        scored = self._score(micro, batch, temperature, entropy_grad=entropy_grad)
        found = loss_of(micro, scored, loss)
        result, losses = found.loss, found.loss.losses.detach()
        total, metrics = result.losses.sum(), dict(result.metrics)
        if scored.imbalance is not None:
            metrics["router_aux_loss"] = micro.share * scored.imbalance
            total = total + self.config.router_aux_loss * metrics["router_aux_loss"]
        (total * self.ranks.size).backward()  # type: ignore[no-untyped-call]
        late.add(
            metrics, losses, partial(raise_not_finite, batch, found.targets, found.logprobs, losses)
        )
        if micro.piece is not None:
            micro.piece.done()

    @torch.no_grad()
    def _read(self, micro: MicroBatch, batch: Batch, temperature: float) -> None:
        self.scorer.eval()
        scored = self._score(micro, batch, temperature, entropy_grad=False)
        if micro.piece is not None:
            note(micro.piece, micro.targets, scored)

    def step(self, late: Unread | None = None) -> Metrics:
        """Clips the gradient, updates the weights, and clears the gradient; returns also the
        metrics of `late`.

        Raises GradientError if the gradient is not finite, and TrainingError, which names the
        rollout and the turn, if a loss is not; the weights are unchanged then.
        """
        reader = reader_of(self.model)
        if reader is None or not reader.trained:
            return self.stepper.step(late)
        reader.backward()
        self.ranks.average_gradients(reader.tower)
        metrics = self.stepper.step(late)
        reader.forget()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and schedule, for torch's DCP. Raises TrainingError for a frozen
        policy."""
        return self.stepper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what `state_dict` returned."""
        self.stepper.load_state_dict(state)
        if (reader := reader_of(self.model)) is not None:
            reader.forget()

    def named_hf_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` as in the checkpoint at `config.path`: weights and buffers, under its
        names; tied weights appear once."""
        return checkpoint_tensors(self.model)

    def hf_shapes(self) -> list[tuple[str, Tensor]]:
        """The same without their contents (device `meta`); no other rank takes part."""
        return list(checkpoint_shapes(self.model))

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of the LoRA adapter in PEFT's format; see `trainer.policy.adapter`."""
        return adapter_tensors(self.model)

    def adapters_off(self) -> AbstractContextManager[Any]:
        """A context in which the LoRA adapters are off, so that the policy has its initial weights.

        Raises TrainingError for a policy without adapters.
        """
        if self.config.lora is None:
            raise TrainingError("this policy has no adapters to switch off; set model.lora")
        manager: AbstractContextManager[Any] = self.model.disable_adapter()
        return manager

    def _score(
        self, micro: MicroBatch, batch: Batch, temperature: float, *, entropy_grad: bool
    ) -> Scored:
        ids = sent(batch.ids[micro.targets], self.device)
        micro = micro if self.replays else replace(micro, experts=None)
        part = self.ranks.context.part(micro).to(self.device)
        kept = None if batch.kept is None else sent(batch.kept[micro.targets], self.device)
        scored: Scored = self.scorer(part, ids, temperature, kept=kept, entropy_grad=entropy_grad)
        return scored


def pack_for(
    model: Any,
    config: ModelConfig,
    batch: Batch,
    sequences: Iterable[int] | None,
    *,
    in_pieces: bool = False,
) -> list[MicroBatch]:
    """The micro-batches of a rank's part, or of a batch that is not divided yet. `in_pieces`: the
    caller computes trees in pieces (`trainer.rows.prefix_tree`)."""
    divided: Iterable[RowPlan] = batch.micro_batches
    if not batch.micro_batches or sequences is not None:
        divided = _divided(model, config, Ranks(), batch, sequences, in_pieces)
    if (reader := reader_of(model)) is not None:
        reader.read(batch)
    positions = positions_of(model)
    laid = lay_out(batch, divided, prefix_bytes=config.prefix_bytes, positions=positions)
    return with_masks(model, laid)


def parts_for(
    model: Any,
    config: ModelConfig,
    ranks: Ranks,
    batch: Batch,
    sequences: Iterable[int] | None,
    *,
    in_pieces: bool = False,
) -> list[BatchPart]:
    """The part of each rank, in micro-batches within the model's context and the memory budget;
    all ranks have the same number of micro-batches, and those that compute each micro-batch
    together have the same part. Raises TrainingError as `Policy.parts`."""
    divided = _divided(model, config, ranks, batch, sequences, in_pieces)
    parts = [part_in_micro_batches(batch, divided[n :: ranks.groups]) for n in range(ranks.groups)]
    return [parts[ranks.group_of(rank)] for rank in range(ranks.size)]


def _divided(
    model: Any,
    config: ModelConfig,
    ranks: Ranks,
    batch: Batch,
    sequences: Iterable[int] | None,
    in_pieces: bool,
) -> list[RowPlan]:
    """The batch's micro-batches, whose number is a multiple of the number of groups of ranks.

    Raises TrainingError for a rollout that is longer than the model's context, has a token outside
    the model's vocabulary, or has images that the model does not read.
    """
    limit, size = context_tokens(model), vocabulary(model)
    check_batch(model, batch)
    for index, ids in enumerate(batch.sequences):
        if len(ids) and int(ids.max()) >= size:
            trial = batch.trial_ids[int(batch.sequence_rollout[index])]
            raise TrainingError(
                f"rollout {trial}: token {int(ids.max())} is outside the model's vocabulary of"
                f" {size} tokens; the engine must serve the model that is trained"
            )
        if len(ids) > limit:
            trial = batch.trial_ids[int(batch.sequence_rollout[index])]
            raise TrainingError(
                f"rollout {trial}: a sequence of {len(ids)} tokens is longer than the model's"
                f" context of {limit}; lower the context length of the engine to {limit}"
            )
    return divide(
        batch,
        max_tokens=config.micro_batch_tokens,
        fill_tokens=None if model.device.type == "cuda" else CPU_FILL_TOKENS,
        share_prefixes=config.share_prefixes,
        in_pieces=in_pieces and not pieces_problem(model),
        sequences=sequences,
        multiple_of=ranks.groups,
    )


def raise_not_finite(batch: Batch, targets: Tensor, logprobs: Tensor, losses: Tensor) -> None:
    """Raises TrainingError, which names the token of the first loss that is not finite."""
    bad = int((~torch.isfinite(losses)).nonzero()[0])
    raise TrainingError(
        f"{batch.name(int(targets[bad]))}: the loss of a token is {float(losses[bad])}"
        f" (log-probability {float(logprobs[bad])}, recorded"
        f" {float(batch.logprobs[targets[bad]])})"
    )
