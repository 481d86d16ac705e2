"""The estimated memory of a rank, compared with what a process of its own uses on the CPU.

One class has linear attention (`trainer.extras.hybrids`)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, LlamaConfig, Qwen3Config

from trainer.optimizer_config import OptimizerConfig
from trainer.policy import memory
from trainer.policy.memory import count_weights, rank_memory
from trainer.policy.model_config import LoraSettings, ModelConfig
from trainer.policy.rank_memory import RankMemory

TOKENS = 1024
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 16000,
}
SETTINGS = Qwen3Config(**SIZES)
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
MEASURE = """
import json, sys
from pathlib import Path
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from trainer.optimizer import Stepper
from trainer.optimizer_config import OptimizerConfig
from trainer.rows.packing import Layout, MicroBatch
from trainer.policy.model_config import DTYPES
from trainer.policy.scorer import CausalScorer, use_packed_rows

def train(settings, tokens, dtype, checkpointing):
    model = AutoModelForCausalLM.from_config(settings)
    use_packed_rows(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = CausalScorer(model.train(), DTYPES[dtype])
    stepper = Stepper(scorer, OptimizerConfig(lr=1e-6), None)
    ids, at = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    micro = MicroBatch(ids, at, Layout(torch.full((tokens,), tokens), tokens), at, at)
    for _ in range(2):
        scorer(micro, ids, 1.0)[0].sum().backward()
    stepper.step()
    scorer(micro, ids, 1.0)[0].sum().backward()

def status(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) * 1024

torch.set_num_threads(1)
kind, settings, tokens, dtype, checkpointing = json.loads(sys.argv[1])
small = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 100}
train(CONFIG_MAPPING[kind](**settings | small), 16, dtype, checkpointing)
before = status("VmRSS")
train(CONFIG_MAPPING[kind](**settings), tokens, dtype, checkpointing)
print(status("VmHWM") - before)  # ru_maxrss would include the process that started this one
"""


def estimated(
    settings: object = SETTINGS,
    ranks: int = 1,
    frozen: int = 0,
    context: int = 1,
    **model: object,
) -> int:
    config = ModelConfig.model_validate(
        {"path": Path("unused"), "max_micro_batch_tokens": TOKENS, **model}
    )
    found = rank_memory(
        settings,
        config,
        OptimizerConfig(),
        ranks=ranks,
        frozen_models=frozen,
        context_parallel=context,
    )
    return found.total


@pytest.mark.parametrize(
    ("kind", "more", "dtype", "checkpointing"),
    [
        pytest.param("qwen3", {}, "float32", False, marks=pytest.mark.long),
        ("qwen3", {}, "bfloat16", True),
        ("qwen3_5_text", LINEAR, "float32", False),
        pytest.param("qwen3_5_text", LINEAR, "bfloat16", True, marks=pytest.mark.long),
    ],
)
def test_estimate_is_the_measured_peak_within_a_fifth(
    dtype: str,
    checkpointing: bool,
    kind: str,
    more: Mapping[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hybrid as without fla, which a CPU cannot execute."""
    monkeypatch.setattr(memory, "has_fla", lambda: False)
    argument = json.dumps([kind, {**SIZES, **more}, TOKENS, dtype, checkpointing])
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, argument], capture_output=True, text=True, check=True
    )
    settings = CONFIG_MAPPING[kind](**SIZES, **more)
    expected = estimated(
        settings, compile_layers=False, compute_dtype=dtype, gradient_checkpointing=checkpointing
    )
    assert 0.8 < int(run.stdout) / expected < 1.2


def test_kernels_of_fla_need_less_and_their_lack_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = CONFIG_MAPPING["qwen3_5_text"](**SIZES, **LINEAR)
    config = ModelConfig(path=Path("unused"), max_micro_batch_tokens=TOKENS)
    monkeypatch.setattr(memory, "has_fla", lambda: False)
    without = rank_memory(hybrid, config, OptimizerConfig())
    assert not rank_memory(SETTINGS, config, OptimizerConfig()).lacks_fla
    monkeypatch.setattr(memory, "has_fla", lambda: True)
    kernels = rank_memory(hybrid, config, OptimizerConfig())
    assert (without.lacks_fla, kernels.lacks_fla) == (True, False)
    assert without.passes is not None
    assert kernels.passes is not None
    assert kernels.passes < 0.9 * without.passes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_long_sequence_is_estimated_from_shorter_ones(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = estimated(gradient_checkpointing=checkpointing)
    monkeypatch.setattr(memory, "SAMPLED_TOKENS", 128)
    assert estimated(gradient_checkpointing=checkpointing) == executed


def test_layers_count_by_their_number() -> None:
    sizes = [
        estimated(LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=depth))
        for depth in (4, 8, 12)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def test_ranks_divide_weights_and_adapters_need_neither_gradients_nor_moments() -> None:
    weights = 4 * 4 * 8_000_000
    assert estimated() - estimated(ranks=8) > weights // 2
    assert estimated() - estimated(lora=LoraSettings(rank=4)) > weights // 2
    assert estimated(frozen=1) > estimated()


def test_critic_of_a_policy_with_an_adapter_is_trained_whole() -> None:
    def parts(models: int, **settings: object) -> RankMemory:
        given = {"path": "unused", "max_micro_batch_tokens": TOKENS}
        config = ModelConfig.model_validate(given | settings)
        return rank_memory(SETTINGS, config, OptimizerConfig(), trained_models=models)

    whole, adapter = parts(1), parts(1, lora=LoraSettings(rank=4))
    both = parts(2, lora=LoraSettings(rank=4))
    assert both.weights == whole.weights + adapter.weights
    assert both.gradients == whole.gradients + adapter.gradients
    assert both.moments == whole.moments + adapter.moments


def test_moments_of_adapters_are_offloaded_one_adapter_at_a_time() -> None:
    lora = LoraSettings(rank=4)
    config = ModelConfig(path=Path("unused"), max_micro_batch_tokens=TOKENS, lora=lora)
    kept, moved = (
        rank_memory(SETTINGS, config, OptimizerConfig(offload=each)) for each in (False, True)
    )
    assert 0 < moved.moments < kept.moments


def test_what_is_offloaded_or_rounded_needs_less() -> None:
    def parts(optimizer: OptimizerConfig, **settings: object) -> RankMemory:
        given = {"path": "unused", "max_micro_batch_tokens": TOKENS, "compute_dtype": "bfloat16"}
        return rank_memory(SETTINGS, ModelConfig.model_validate(given | settings), optimizer)

    adamw = OptimizerConfig()
    kept = parts(adamw, gradient_checkpointing=True)
    half = parts(adamw, gradient_checkpointing=True, weights_dtype="bfloat16")
    assert (2 * half.weights, 2 * half.gradients) == (kept.weights, kept.gradients)
    assert half.moments == kept.moments
    moved = parts(adamw.model_copy(update={"offload": True}))
    assert moved.moments == 8 * SIZES["vocab_size"] * SIZES["hidden_size"]
    away = parts(adamw, activation_offload=True)
    assert away.passes is not None
    assert kept.passes is not None
    inputs = SIZES["num_hidden_layers"] * TOKENS * SIZES["hidden_size"]
    assert away.passes <= kept.passes - 4 * inputs


def test_ranks_of_one_micro_batch_divide_its_activations() -> None:
    config = ModelConfig(path=Path("unused"), max_micro_batch_tokens=TOKENS)
    whole, half, quarter = (
        rank_memory(SETTINGS, config, OptimizerConfig(), context_parallel=size).passes
        for size in (1, 2, 4)
    )
    assert whole is not None
    assert half is not None
    assert quarter is not None
    # The output layer's gradient and chunk of logits are those of one rank.
    assert 0.5 < half / whole < 0.7
    assert 0.25 < quarter / whole < 0.5


def test_weights_of_a_tied_output_layer_are_counted_once() -> None:
    tied = Qwen3Config(**SIZES, tie_word_embeddings=True)
    untied = Qwen3Config(**SIZES, tie_word_embeddings=False)
    shared = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert count_weights(untied) - count_weights(tied) == shared
    model, optimizer = ModelConfig(path=Path("unused")), OptimizerConfig()
    sizes = [rank_memory(each, model, optimizer).weights for each in (untied, tied)]
    assert sizes[0] - sizes[1] == 4 * shared


def test_kept_prefix_is_its_keys_and_values_with_float32_gradients() -> None:
    config = ModelConfig(path=Path("unused"), max_micro_batch_tokens=TOKENS)
    tokens = 16 * TOKENS
    found = rank_memory(SETTINGS, config, OptimizerConfig(), longest=tokens)
    per_token = SIZES["num_hidden_layers"] * 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"]
    assert found.kept_prefix == tokens * per_token * (4 + 4)
    assert found.passes is not None
    assert 0 < found.piece < found.passes / 4
    on_host = config.model_copy(update={"activation_offload": True})
    assert rank_memory(SETTINGS, on_host, OptimizerConfig(), longest=tokens).kept_prefix == 0
    assert found.in_pieces == found.piece + found.kept_prefix
