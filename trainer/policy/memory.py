"""How much memory a rank of the trainer needs, before it is started.

The trainer's own forward pass is executed on tensors that have shapes but no memory (torch's
`FakeTensorMode`), for one and for two repetitions of the model's pattern of layers. What autograd
keeps for the backward pass is counted there; the rest follows from the number of weights.

Shapes: `T` tokens of a micro-batch, `V` vocabulary, `D` hidden size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers.initialization import no_init_weights

from proxy.settings.late_section import load_extra
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.attention import after_sink
from trainer.policy.compiled_layers import KeptByGraphs
from trainer.policy.context_parallel import ContextRanks
from trainer.policy.delta_layers import has_delta_layers, has_fla
from trainer.policy.model_config import DTYPES, ModelConfig, recompute
from trainer.policy.rank_memory import RankMemory
from trainer.policy.scorer import CausalScorer, use_packed_rows
from trainer.policy.shrink import EXPERTS, layer_kinds, with_depth
from trainer.policy.token_logprobs import LOGIT_COPIES, chunk_rows
from trainer.policy.towers import text_model, tower_of
from trainer.rows.kept import Kept, Piece
from trainer.rows.packing import Layout, MicroBatch

_log = logging.getLogger(__name__)

SAMPLED_TOKENS = 2048
"""Tokens of a rank with which a pass is executed; what longer ones keep follows from those and
twice as many. A multiple of the stretches of `delta_rule`."""
KEPT_TOKENS = 512
"""Tokens with which `kept_per_token` executes a pass."""
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Bytes of optimizer state per trained weight."""


def rank_memory(
    settings: Any,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    *,
    ranks: int = 1,
    context_parallel: int = 1,
    weight_copies: int = 1,
    longest: int = 0,
    trained_models: int = 1,
    frozen_models: int = 0,
    gpu_bytes: int = 0,
) -> RankMemory:
    """The memory of one of `ranks` that train the model of these settings (a checkpoint's
    `config.json`), of which `context_parallel` compute each micro-batch together; the ranks hold
    `weight_copies` copies. `longest`: tokens of the longest sequence, which has a pass of its own.
    `trained_models`: the policy, and a critic of its size, whose weights are all trained;
    `frozen_models`: references and teachers of its size; `gpu_bytes`: the memory of its GPU, by
    which chunks of logits are chosen."""
    tower = 0 if model.vision == "text" else _tower_weights(_Settings(settings))
    settings = settings.get_text_config()
    compute_bytes = DTYPES[model.compute_dtype].itemsize
    whole = _without_memory(_Settings(settings))
    count = _weights(whole)
    layers = [_weights(layer) for layer in whole.get_decoder().layers]
    adapters = [] if model.lora is None else _adapter_weights(whole, model)
    critics = trained_models - 1
    trained = critics * count + (sum(adapters) or count)
    trained_bytes = DTYPES[model.weights_dtype].itemsize
    stored = trained_bytes * (trained_models * count + sum(adapters))
    frozen = frozen_models * count * compute_bytes
    gathered, shards = 0, ranks // weight_copies
    kept = _kept_prefix(settings, model, longest)
    tokens = max(longest, model.micro_batch_tokens)
    widest = model.model_copy(update={"max_micro_batch_tokens": tokens})
    if ranks > 1:
        gathered = compute_bytes * (count - sum(layers) + 2 * max(layers)) + 4 * max(layers)
    # A tower is whole on each rank, and frozen in all models but one.
    towers = compute_bytes * tower * (trained_models + frozen_models)
    learnt = tower if model.vision == "trained" else 0
    towers += (trained_bytes - compute_bytes) * learnt
    return RankMemory(
        weights=(stored + frozen) // shards + towers,
        gradients=trained_bytes * (trained // shards + learnt),
        moments=MOMENT_BYTES[optimizer.name]
        * (
            _largest(whole, [] if critics else adapters)
            if optimizer.offload
            else trained + learnt * shards
        )
        // shards,
        gathered=gathered,
        passes=_passes(settings, widest, context_parallel, gpu_bytes),
        longest_prefix=kept.size // context_parallel,
        prefix_room=model.prefix_bytes,
        piece=(_passes(settings, model, context_parallel, gpu_bytes) or 0)
        + kept.joined // context_parallel,
        lacks_fla=has_delta_layers(whole) and not has_fla(),
    )


def recomputable(settings: Any) -> range:
    """The numbers of layers of which a plan may recompute the first: whole repetitions of the
    model's pattern of layers, so that each kind has its share."""
    text = settings.get_text_config()
    period, depth = _pattern(_Settings(text)), text.num_hidden_layers
    return range(period, depth + 1, period)


def _largest(whole: nn.Module, adapters: Sequence[int]) -> int:
    """Size of the largest trained weight, whose moments are on the GPU if the others are in the
    machine's memory."""
    return max(adapters or (weight.numel() for weight in whole.parameters()))


def kept_per_token(settings: Any, model: ModelConfig, *, kernels: bool | None = None) -> float:
    """Bytes that autograd keeps of a token and layer, in the mean of the layers. `kernels`: whether
    layers of the delta rule have those of fla; None: if it is installed."""
    text = settings.get_text_config()
    period, kernels = _pattern(_Settings(text)), has_fla() if kernels is None else kernels
    sizes = [
        _saved(with_depth(text, depth), model, _one_path(tokens, ContextRanks()), kernels).size
        for tokens in (KEPT_TOKENS, 2 * KEPT_TOKENS)
        for depth in (period, min(2 * period, text.num_hidden_layers))
    ]
    more: int = min(2 * period, text.num_hidden_layers) - period
    if not more:  # no two repetitions: with what embeddings and output layer keep
        return (sizes[2] - sizes[0]) / (period * KEPT_TOKENS)
    return (sizes[3] - sizes[2] - sizes[1] + sizes[0]) / (more * KEPT_TOKENS)


def count_weights(settings: Any) -> int:
    """The number of weights of the text model of these settings."""
    return _weights(_without_memory(_Settings(settings.get_text_config())))


def adapter_weights(settings: Any, rank: int) -> int:
    """The number of weights of an adapter on every linear layer, the output layer included, for
    which an engine keeps room."""
    whole = _without_memory(_Settings(settings.get_text_config()))
    linear = [each for each in whole.modules() if isinstance(each, nn.Linear)]
    return sum(rank * (each.in_features + each.out_features) for each in linear)


class _Settings:
    """Text settings that are compared by their contents: a plan asks for the same model often."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.key = settings.to_json_string(use_diff=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=2)
def _without_memory(given: _Settings) -> Any:
    """The model of these settings, whose weights have shapes only."""
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        model = text_model(given.settings)
        model.tie_weights()  # not done without initialisation
    return model


@functools.lru_cache(maxsize=2)
def _tower_weights(given: _Settings) -> int:
    """The number of weights of the tower of these settings."""
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        return _weights(tower_of(given.settings))


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _adapter_weights(whole: Any, model: ModelConfig) -> list[int]:
    """Sizes of the weights of adapters on all linear layers except the output layer."""
    assert model.lora is not None
    head = whole.get_output_embeddings()
    linear = [m for m in whole.modules() if isinstance(m, nn.Linear) and m is not head]
    return [model.lora.rank * size for m in linear for size in (m.in_features, m.out_features)]


def _passes(settings: Any, model: ModelConfig, context_parallel: int, gpu_bytes: int) -> int | None:
    """The peak of what a forward and backward pass adds to weights, gradients and moments."""
    tokens = -(-model.micro_batch_tokens // context_parallel)
    head = _head_bytes(settings, model, tokens, gpu_bytes)
    given, depth = _Settings(settings), settings.num_hidden_layers
    count = min(model.recomputed_layers or depth, depth) if model.checkpoints else 0
    # Of one size for all micro-batches, by which passes are remembered.
    whole = model.model_copy(update={"max_micro_batch_tokens": None})
    if count:
        whole = whole.model_copy(update={"gradient_checkpointing": True})
    none = whole.model_copy(update={"gradient_checkpointing": False})

    def counted(chosen: ModelConfig) -> tuple[float, float]:
        return _counted(given, chosen, model.micro_batch_tokens, context_parallel)

    try:
        if count == 0:
            kept, layer = counted(none)
            return int(kept + max(layer, head))
        kept, layer = counted(whole)
        if count == depth:
            return int(kept + max(layer, head))
        more, other = counted(none)
    except RuntimeError as error:  # all that FakeTensorMode raises
        _log.info("the activations of %s are not estimated: %s", settings.model_type, error)
        return None
    # The others come first in the backward pass, and have freed what they kept when these come.
    first = more + count / depth * (kept - more) + max(other, head)
    return int(max(first, kept + layer))


@dataclass(frozen=True, slots=True)
class _KeptPrefix:
    """Bytes of a prefix that passes over a tree in pieces hand on."""

    size: int = 0
    """Keys, values, and their gradients; of linear layers, a state for each micro-batch of it."""
    joined: int = 0
    """Copies of the keys and values that a pass keeps beside its own for its backward pass."""


def _kept_prefix(settings: Any, model: ModelConfig, tokens: int) -> _KeptPrefix:
    """Of a prefix of this number of tokens."""
    if not model.share_prefixes or not tokens:
        return _KeptPrefix()
    try:
        elements = tokens * _kept_elements(_Settings(settings))
    except RuntimeError as error:  # all that FakeTensorMode raises
        _log.info("the prefixes of %s are not estimated: %s", settings.model_type, error)
        return _KeptPrefix()
    states, kinds = 0, list(getattr(settings, "layer_types", None) or ())
    if linear := kinds.count("linear_attention"):
        size = settings.linear_num_value_heads * settings.linear_key_head_dim
        forks = tokens // model.micro_batch_tokens + 1
        states = 2 * 4 * linear * forks * size * settings.linear_value_head_dim
    each, depth = DTYPES[model.compute_dtype].itemsize, settings.num_hidden_layers
    # What is recomputed is joined for one layer at a time.
    again = (model.recomputed_layers or depth) if model.checkpoints else 0
    layers = min(depth, depth - again + 1)
    # The gradients are float32.
    return _KeptPrefix(int(elements * (each + 4)) + states, int(elements * each * layers / depth))


@functools.lru_cache(maxsize=8)
def _kept_elements(given: _Settings) -> float:
    """Number of elements of a token's keys and values in all layers of attention."""
    settings, period = given.settings, _pattern(given)
    depth = settings.num_hidden_layers
    once = _entered(with_depth(settings, min(period, depth)))
    if 2 * period > depth:
        return _entered(settings)
    more = _entered(with_depth(settings, 2 * period)) - once
    return float(once + (depth / period - 1) * more)


def _entered(settings: Any) -> float:
    at = torch.arange(KEPT_TOKENS)
    none = torch.zeros(0, dtype=torch.int64)
    counter = _Counter(0, (), none, none, Kept())
    layout = Layout(torch.full_like(at, KEPT_TOKENS), KEPT_TOKENS, piece=counter)
    _derive(layout)
    micro = MicroBatch(at * 0, at, layout, none, none)
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights(), torch.no_grad():
        network = text_model(settings, dtype=torch.bfloat16)
        use_packed_rows(network)
        CausalScorer(network.eval(), torch.bfloat16)(micro, none, 1.0)
    return sum(counter.elements) / KEPT_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class _Counter(Piece):
    """Counts the elements of keys and values, and keeps nothing."""

    elements: list[int] = field(default_factory=list)

    def entered(
        self, layer: Hashable, *rows: Tensor, dim: int, chosen: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if chosen is None:
            self.elements.extend(each.numel() for each in rows)
        return rows

    def reached(self, width: int) -> Tensor:
        return self.open_rows


def _counted(
    given: _Settings, model: ModelConfig, tokens: int, context_parallel: int
) -> tuple[float, float]:
    """Bytes that a pass over a micro-batch of `tokens` keeps, and those that the backward pass of
    its largest layer adds."""
    sampled, kernels = SAMPLED_TOKENS * context_parallel, has_fla()
    if tokens <= 2 * sampled:
        return _pass(given, model, tokens, context_parallel, kernels)
    # All that is kept grows with the tokens alone: nothing of the attention is kept per pair.
    kept, layer = (
        twice + (tokens / sampled - 2) * (twice - once)
        for once, twice in zip(
            *(_pass(given, model, n * sampled, context_parallel, kernels) for n in (1, 2)),
            strict=True,
        )
    )
    return kept, layer


@functools.lru_cache(maxsize=16)
def _pass(
    given: _Settings, model: ModelConfig, tokens: int, context_parallel: int, kernels: bool
) -> tuple[float, float]:
    """Bytes that a pass over this number of tokens keeps, and those that the backward pass of its
    largest layer adds. `kernels`: whether layers of the delta rule have those of fla."""
    settings, ranks = given.settings, ContextRanks(context_parallel)
    micro = _one_path(tokens, ranks)
    depth = settings.num_hidden_layers
    period = _pattern(given)
    kept: float
    if 2 * period > depth:
        kept = _saved(settings, model, micro, kernels).size
    else:
        once, twice = (
            _saved(with_depth(settings, n * period), model, micro, kernels).size for n in (1, 2)
        )
        kept = once + (depth / period - 1) * (twice - once)
    keeps = {
        "gradient_checkpointing": False,
        "activation_offload": False,
    }
    whole = model.model_copy(update=keeps)
    largest = _saved(with_depth(settings, min(period, depth)), whole, micro, kernels)
    # The backward pass of a layer holds the gradients of what the layer keeps; with gradient
    # checkpointing also what it keeps, which is computed again; and that of a compiled layer as
    # much of what it did not keep.
    again = 1 + model.checkpoints + model.compiles
    return kept, largest.of_a_layer * again + largest.extra


def _head_bytes(settings: Any, model: ModelConfig, tokens: int, gpu_bytes: int) -> int:
    """The output layer's backward pass over this number of tokens: its gradient, its weights in the
    compute type, and chunks of logits."""
    compute_bytes = DTYPES[model.compute_dtype].itemsize
    weights = settings.vocab_size * settings.hidden_size
    rows = min(chunk_rows(settings.vocab_size, gpu_bytes), tokens)
    cast = compute_bytes if compute_bytes != 4 else 0
    return int(weights * (4 + cast) + LOGIT_COPIES * 4 * rows * settings.vocab_size)


@dataclass(frozen=True, slots=True)
class _Saved:
    """Bytes of what autograd keeps after a forward pass of a model, its own weights excepted."""

    size: int
    of_a_layer: int
    """Of the layer that keeps most."""
    extra: int
    """What the backward pass of fla's kernel allocates beyond the gradients of what it kept."""


def _saved(settings: Any, model: ModelConfig, micro: MicroBatch, kernels: bool) -> _Saved:
    ids = torch.zeros(len(micro.targets), dtype=torch.int64)
    dtype, stored, scale = DTYPES[model.compute_dtype], DTYPES[model.weights_dtype], 1
    if _has_experts(settings) and dtype != torch.bfloat16:
        # torch knows the shapes of grouped products in bfloat16 only
        scale, dtype, stored = dtype.itemsize // 2, torch.bfloat16, torch.bfloat16
    kept: dict[int, Tensor] = {}
    graphs: KeptByGraphs | None = None
    kernel: Any = None
    bounds: list[int] = []
    """How many tensors were kept before and after each layer."""

    def keep(tensor: Tensor) -> Tensor:
        for each in [tensor] if graphs is None else graphs.sources(tensor):
            kept.setdefault(each.untyped_storage()._cdata, each)
        return tensor

    def mark(*_: object) -> None:
        bounds.append(len(kept))

    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        network = text_model(settings, dtype=stored)
        use_packed_rows(network)
        if kernels and has_delta_layers(network):
            kernel = load_extra("trainer.extras.hybrids.delta_memory:KernelShapes")()
            load_extra("trainer.extras.hybrids.delta_rule:fork_states")(network, kernel)
        if model.checkpoints:
            recompute(network, model)
        layers = network.get_decoder().layers
        for layer in layers:
            layer.register_forward_pre_hook(mark)
            layer.register_forward_hook(mark)
        scorer = CausalScorer(network.train(), dtype, offload=model.activation_offload)
        own = {parameter.untyped_storage()._cdata for parameter in scorer.parameters()}
        if model.compiles:
            graphs = KeptByGraphs(layers)
        with graphs or nullcontext(), saved_tensors_hooks(keep, lambda tensor: tensor):
            scorer(micro, ids, 1.0)
        sizes = [
            0 if key in own else scale * tensor.untyped_storage().nbytes()
            for key, tensor in kept.items()
        ]
    of_layers = [
        sum(sizes[before:after]) for before, after in zip(bounds[::2], bounds[1::2], strict=True)
    ]
    return _Saved(sum(sizes), max(of_layers), scale * (0 if kernel is None else kernel.extra))


def _has_experts(settings: Any) -> bool:
    return any(getattr(settings, name, None) for name in EXPERTS)


def _one_path(tokens: int, ranks: ContextRanks) -> MicroBatch:
    """A rank's part of one sequence of which every token is trained. What is derived from its
    layout is computed here, outside of fake tensors."""
    at, ids = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
    micro = ranks.part(MicroBatch(ids, at, Layout(torch.full_like(at, tokens), tokens), at, at))
    _derive(micro.layout)
    return micro


def _derive(layout: Layout) -> None:
    """Computes what layers derive from the layout, whose sizes fake tensors do not know."""
    for part in ("runs", "parents", "parent_runs", "depths"):
        getattr(layout, part)
    _ = after_sink(layout).runs


@functools.lru_cache(maxsize=8)
def _pattern(given: _Settings) -> int:
    """The length of the pattern of the model's layers."""
    return _period(layer_kinds(given.settings))


def _period(kinds: Sequence[Any]) -> int:
    """The length of the pattern that the kinds of layers repeat."""
    count = len(kinds)
    lengths = (n for n in range(1, count) if count % n == 0)
    return next((n for n in lengths if list(kinds[:n]) * (count // n) == list(kinds)), count)
