"""Compiled layers compute and keep what they should, whatever kernels a GPU then runs.

torch divides and differentiates graphs on a CPU as on a GPU; `aot_eager_decomp_partition` runs them
by torch's own operations, and inductor by kernels that it writes for the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from tests.trainer.policy.float64 import in_float64
from trainer.extras.experts.router_replay import replay_routing
from trainer.policy.architecture import without_noise
from trainer.policy.compiled_layers import KeptByGraphs, compile_layers
from trainer.policy.context_parallel import ContextRanks
from trainer.policy.memory import _one_path, kept_per_token
from trainer.policy.model_config import ModelConfig, recompute
from trainer.policy.proof_on_copy import randomize
from trainer.policy.scorer import CausalScorer, use_packed_rows
from trainer.policy.shrink import CHOSEN, EXPERTS, VOCABULARY, number_of, shrunk
from trainer.rows.packing import Layout, MicroBatch

TORCH = "aot_eager_decomp_partition"
LENGTHS = (70, 33, 130)
TRAINED = [each for each in ARCHITECTURES if not each.refused]
MOST_GRAPHS = 4
"""Of all layers. With FlexAttention's (at most 2) and those of the output layer (2), a run compiles
no more than 8."""
FORKED = ("Gemma 2", "Qwen 3.5")
"""Attention with windows, and Gated DeltaNet."""
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""In float64, a fault of either way to compute shows, and rounding does not."""
FAST = ("Gemma 2", "Qwen 3 MoE")
"""A soft cap, two kinds of layers, norms before and after each part; experts."""
BESIDE = (
    ("Gemma 2", torch.float64),
    ("Gemma 2", torch.bfloat16),
    ("Qwen 3 MoE", torch.bfloat16),
)
"""Of these, gradients are compared, too: in the type that shows each fault, and in that in which
layers are compiled. One takes 10 s to 25 s of processor time."""
WIDE = Qwen3Config(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
)
"""Qwen3-1.7B."""

every_architecture = pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.title in FAST else pytest.mark.long, id=each.title)
        for each in TRAINED
    ],
)
COMPILED = ModelConfig(path=Path("unused"), compute_dtype="bfloat16", compile_layers=True)


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small_model(architecture: Architecture, times: int = 1) -> Any:
    torch.manual_seed(0)
    settings = shrunk(without_noise(architecture.settings()), times)
    model = AutoModelForCausalLM.from_config(settings)
    randomize(model)
    use_packed_rows(model)
    return model.train()


def computed(model: Any, dtype: torch.dtype, tokens: int) -> tuple[Tensor, dict[str, Tensor], int]:
    """Log-probabilities, gradients, and the bytes that were kept besides weights."""
    model.zero_grad()
    micro = _one_path(tokens, ContextRanks())
    micro = replace(micro, ids=torch.arange(tokens) * 5 % VOCABULARY)
    ids = torch.arange(tokens) * 7 % VOCABULARY
    kept: dict[int, Tensor] = {}

    @torch.compiler.disable
    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = CausalScorer(model, dtype).train()(micro, ids, 1.0).logprobs
    own = {each.untyped_storage()._cdata for each in model.parameters()}
    size = sum(each.untyped_storage().nbytes() for key, each in kept.items() if key not in own)
    # Of one sign: else the sums of `A_log`, one number a head, cancel, and show rounding alone.
    (logprobs * torch.linspace(0, 2, tokens)).sum().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return logprobs.detach(), found, size


@dataclass(frozen=True, slots=True)
class Compared:
    """Compiled layers beside eager ones, in one type."""

    logprobs: float
    """The largest difference of a log-probability."""
    gradients: float
    """The largest difference of a gradient, as a part of the largest element of its weight's."""
    kept: tuple[int, int]
    """Bytes besides weights that the compiled layers keep, and the eager ones."""
    graphs: tuple[int, int]
    """Number of graphs after the first length, and after all lengths."""
    breaks: tuple[str, ...]
    """Reasons for which graphs end, besides functions that are to stay outside of them."""
    refused: tuple[str, ...]
    """Reasons for which graphs are not compiled."""


def compared(architecture: Architecture, dtype: torch.dtype) -> Compared:
    """With torch's own operations in the graphs."""
    model = small_model(architecture)
    if dtype.itemsize < 8:
        eager = computed(model, dtype, LENGTHS[0])
        compile_layers(model.get_decoder().layers, TORCH)
        return _beside(model, dtype, eager)
    # routers say `torch.float`
    with in_float64(), patch.object(torch, "float", torch.float64):
        exact_model = small_model(architecture)
        exact_model.load_state_dict(model.state_dict())
        exact_model.double()
        exact = computed(exact_model, dtype, LENGTHS[0])
        compile_layers(exact_model.get_decoder().layers, TORCH)
        return _beside(exact_model, dtype, exact)


def _beside(
    model: Any, dtype: torch.dtype, eager: tuple[Tensor, dict[str, Tensor], int]
) -> Compared:
    """The compiled layers of the model beside what it computed before."""
    logprobs, gradients, kept = eager
    torch._dynamo.reset()
    counters.clear()
    own = computed(model, dtype, LENGTHS[0])
    assert own[1].keys() == gradients.keys()
    graphs = counters["stats"]["unique_graphs"]
    for tokens in LENGTHS[1:]:
        computed(model, dtype, tokens)
    return Compared(
        float((own[0] - logprobs).abs().max()),
        max(_apart(own[1][name], gradient) for name, gradient in gradients.items()),
        (own[2], kept),
        (graphs, counters["stats"]["unique_graphs"]),
        tuple(why for why in counters["graph_break"] if "compiler.disable" not in why),
        tuple(counters["unimplemented"]),
    )


def _apart(found: Tensor, expected: Tensor) -> float:
    scale = max(float(expected.abs().max()), 1e-3)
    return float((found - expected).abs().max()) / scale


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(each, dtype, marks=() if (each.title, dtype) in BESIDE else pytest.mark.long)
        for each in TRAINED
        for dtype in TOLERANCES
    ],
    ids=lambda each: each.title if isinstance(each, Architecture) else str(each),
)
def test_compiled_layers_are_the_eager_ones_and_keep_less(
    architecture: Architecture, dtype: torch.dtype
) -> None:
    found = compared(architecture, dtype)
    assert found.logprobs < TOLERANCES[dtype]
    assert found.gradients < TOLERANCES[dtype]
    assert found.kept[0] < found.kept[1]
    if dtype != torch.float64:  # in which experts are computed by other functions
        assert not found.breaks
    if dtype == torch.bfloat16:  # in which layers are compiled at all
        assert not found.refused
        assert found.graphs[0] == found.graphs[1], "compiled again for another length"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.title in FORKED else pytest.mark.long, id=each.title)
        for each in TRAINED
    ],
)
def test_compiled_layers_compute_the_sequences_of_a_row_apart(architecture: Architecture) -> None:
    model, tokens = small_model(architecture), torch.arange(40)
    ends, positions = torch.tensor([20] * 20 + [40] * 20), tokens % 20
    row = MicroBatch(tokens * 5 % VOCABULARY, positions, Layout(ends, 20), tokens, tokens)
    ids = tokens * 7 % VOCABULARY
    with torch.no_grad():
        expected = CausalScorer(model, torch.float32).eval()(row, ids, 1.0).logprobs
        compile_layers(model.get_decoder().layers, "eager")
        found = CausalScorer(model, torch.float32).eval()(row, ids, 1.0).logprobs
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@every_architecture
@pytest.mark.filterwarnings("ignore")
def test_all_layers_of_a_kind_share_their_graphs(architecture: Architecture) -> None:
    """Also with replayed experts: a graph for each layer would take minutes, and be too many."""
    settings = architecture.settings().get_text_config()
    for replays in (False, True) if number_of(settings, EXPERTS) else (False,):
        # The last layers of Gemma 4 also keep their keys and values, which with more layers are
        # not the first ones of their kind.
        few, more = (_passes(architecture, times, replays=replays) for times in (2, 3))
        assert few.graphs == more.graphs
        torch.testing.assert_close(more.compiled, more.eager, atol=2e-5, rtol=2e-5)


@every_architecture
@pytest.mark.filterwarnings("ignore")
def test_all_passes_share_their_graphs(architecture: Architecture) -> None:
    """Those of training, those that only read, those that score, and those of adapters, in which
    the first layer's input has no gradient."""
    tokens, graphs, model = 70, 0, small_model(architecture)
    micro = replace(_one_path(tokens, ContextRanks()), ids=torch.arange(tokens) * 5 % VOCABULARY)
    ids = torch.arange(tokens) * 7 % VOCABULARY
    scorer = CausalScorer(model, torch.float32)

    def counting(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    with torch.no_grad():
        expected = scorer.train()(micro, ids, 1.0).logprobs
    compile_layers(model.get_decoder().layers, counting)
    trained = scorer.train()(micro, ids, 1.0).logprobs
    at_first = graphs
    with torch.no_grad():
        read = scorer.train()(micro, ids, 1.0).logprobs
        scored = scorer.eval()(micro, ids, 1.0).logprobs
    assert not read.requires_grad
    model.get_input_embeddings().requires_grad_(False)
    adapted = scorer.train()(micro, ids, 1.0).logprobs
    assert graphs == at_first <= MOST_GRAPHS
    for each in (trained, read, scored, adapted):
        torch.testing.assert_close(each.detach(), expected, atol=2e-5, rtol=2e-5)


@dataclass(frozen=True, slots=True)
class _Passes:
    compiled: Tensor
    eager: Tensor
    graphs: int


def _passes(architecture: Architecture, times: int, *, replays: bool) -> _Passes:
    """Log-probabilities, with the experts that others than the router have chosen if `replays`."""
    model, tokens, graphs = small_model(architecture, times), 20, 0
    micro = replace(_one_path(tokens, ContextRanks()), ids=torch.arange(tokens) * 5 % VOCABULARY)
    if replays:
        replay_routing(model)
        text = model.config.get_text_config()
        scores = torch.rand(tokens, text.num_hidden_layers, number_of(text, EXPERTS))
        micro = replace(micro, experts=scores.topk(number_of(text, CHOSEN)).indices.int())

    def counting(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    def scored() -> Tensor:
        ids = torch.arange(tokens) * 7 % VOCABULARY
        return CausalScorer(model, torch.float32).train()(micro, ids, 1.0).logprobs

    torch._dynamo.reset()
    eager = scored().detach()
    compile_layers(model.get_decoder().layers, counting)
    return _Passes(scored().detach(), eager, graphs)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", ["Qwen 3", "Gemma 2", "Qwen 3.5", "Qwen 3 MoE"])
def test_kernels_of_inductor_are_as_near_to_float64_as_eager_ones(title: str) -> None:
    from benchmarks.gpu.exactness import compare, paths_and_reference

    model, batch, weights, exact = paths_and_reference(title)
    use_packed_rows(model)
    cpu = torch.device("cpu")
    eager = compare(model, batch, weights, exact, torch.bfloat16, cpu)
    compile_layers(model.get_decoder().layers)
    compiled = compare(model, batch, weights, exact, torch.bfloat16, cpu)
    for figure in ("mean Δ log p", "gradient"):
        assert compiled[figure] < 1.5 * eager[figure]


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "head_dim": 64,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS_SIZES = {"moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [partial(Qwen3Config, **SIZES), partial(Qwen3MoeConfig, **SIZES, **EXPERTS_SIZES)],
    ids=["dense", "experts"],
)
def test_plan_counts_what_compiled_layers_keep(settings: Callable[..., Any]) -> None:
    """The plan executes the eager code, because compiling takes seconds. Of experts, the rows that
    each has are chosen again from the hidden states."""
    tokens, kept = 256, []
    for depth in (4, 2):
        model = AutoModelForCausalLM.from_config(settings(num_hidden_layers=depth))
        use_packed_rows(model)
        compile_layers(model.model.layers, TORCH)
        kept.append(computed(model, torch.bfloat16, tokens)[2])
    planned = kept_per_token(settings(num_hidden_layers=2), COMPILED)
    assert (kept[0] - kept[1]) / 2 / tokens == pytest.approx(planned, rel=0.02)


@pytest.mark.filterwarnings("ignore")
def test_plan_counts_what_layers_with_sinks_keep() -> None:
    (architecture,) = [each for each in ARCHITECTURES if each.title == "gpt-oss"]
    settings = shrunk(without_noise(architecture.settings()))
    eager = COMPILED.model_copy(update={"compile_layers": False})
    assert 0 < kept_per_token(settings, COMPILED) < kept_per_token(settings, eager)


def test_layer_of_width_2048_keeps_less_than_60_kb_of_a_token() -> None:
    assert kept_per_token(WIDE, COMPILED) < 60 * 1024
    eager = COMPILED.model_copy(update={"compile_layers": False})
    assert kept_per_token(WIDE, eager) > 2 * 60 * 1024


def test_gradient_checkpointing_is_on_in_the_first_layers_only() -> None:
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
        )
    )
    config = {"path": "unused"}
    for count, expected in ((True, 4), (1, 1), (3, 3)):
        recompute(model, ModelConfig.model_validate(config | {"gradient_checkpointing": count}))
        on = [layer.gradient_checkpointing for layer in model.model.layers]
        assert on == [True] * expected + [False] * (4 - expected)


def test_function_outside_of_graphs_ends_what_is_computed_again() -> None:
    layer = torch.nn.Linear(8, 8)
    with KeptByGraphs([layer]) as graphs:
        out = layer(torch.ones(2, 8))
        assert graphs.sources(out)[0] is out
