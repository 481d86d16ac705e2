"""Architectures that are computed exactly are accepted; others are refused with the reason.

Some are mixtures of experts (`trainer.extras.experts`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.trainer.policy.test_policy import make_policy
from trainer.errors import ConfigError
from trainer.policy.architecture import without_noise
from trainer.policy.attention import packed_attention
from trainer.policy.model_config import LoraSettings, load_settings
from trainer.rows.packing import Layout

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def nothing_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Architectures that other tests have proven are proven again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(path: Path, kind: str, **changes: Any) -> Path:
    """A checkpoint of a tiny model of that type, with weights far from their initial values."""
    settings = CONFIG_MAPPING[kind](**(TINY | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    for parameter in model.parameters():
        parameter.data += 0.15 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("llama", {"attention_dropout": 0.5}),
        ("mistral", {"sliding_window": None}),
        ("olmo2", {}),
        ("mixtral", {**EXPERTS, "router_jitter_noise": 0.3}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("gpt_oss", {**EXPERTS, "head_dim": 8}),
        ("phi", {}),
        ("phimoe", {**EXPERTS, "router_jitter_noise": 0.1}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.5}),
        ("gemma2", {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0}),
        ("seed_oss", {"head_dim": 8, "attention_dropout": 0.1}),
    ],
)
def test_architecture_with_equal_scores_is_accepted(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    policy = make_policy(saved(tmp_path, kind, **changes))
    assert next(policy.model.parameters()).requires_grad


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {"n_head": 4}, "gpt2 models cannot be computed packed"),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "original_max_position_embeddings": 32,
            },
            "rope_type=dynamic makes positions depend on the longest sequence",
        ),
        ("falcon", {}, "falcon models cannot be computed packed: .*'layers'"),
        ("bloom", {"n_head": 4}, "bloom models cannot be computed packed"),
        ("gptj", {"rotary_dim": 4}, "gptj models cannot be computed packed"),
        ("stablelm", {}, "StableLmAttention does not pass the layout"),
        # Its attention gets its window in a dense mask alone.
        (
            "phimoe",
            {**EXPERTS, "sliding_window": 4},
            r"phimoe models are not supported: layer 0 \(PhimoeDecoderLayer\) differs",
        ),
    ],
)
def test_architecture_that_is_not_computed_exactly_is_refused_with_the_reason(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path, kind, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        make_policy(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_unknown_argument_of_attention_is_refused_with_its_name() -> None:
    query = torch.zeros(1, 1, 2, 4)
    layout = Layout(torch.tensor([2, 2]), 2)
    module = torch.nn.Identity()
    known: dict[str, Any] = {"dropout": 0.0, "softcap": None, "use_cache": False}
    packed_attention(module, query, query, query, None, layout=layout, **known)
    unknown: dict[str, Any] = {"position_bias": query, "head_mask": query, "dropout": 0.1}
    for name, value in unknown.items():
        with pytest.raises(ValueError, match=f"does not compute the argument {name}"):
            packed_attention(module, query, query, query, None, layout=layout, **{name: value})
    with pytest.raises(ValueError, match="is causal, but the layer is not"):
        packed_attention(module, query, query, query, None, layout=layout, is_causal=False)
    with pytest.raises(ValueError, match="does not pass the layout"):
        packed_attention(module, query, query, query, None)


def test_model_that_transforms_its_logits_is_refused_because_its_scores_differ(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(AutoModelForCausalLM.from_pretrained(checkpoint))
    forward = kind.forward

    def transformed(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 0.9
        return output

    monkeypatch.setattr(kind, "forward", transformed)
    with pytest.raises(ConfigError, match=r"the output layer differs from its own by .*e-0"):
        make_policy(checkpoint)


def test_model_with_noise_in_training_mode_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlp = type(AutoModelForCausalLM.from_pretrained(checkpoint).model.layers[0].mlp)
    forward = mlp.forward

    def noisy(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = forward(self, hidden)
        return torch.nn.functional.dropout(output, 0.1, self.training)

    monkeypatch.setattr(mlp, "forward", noisy)
    with pytest.raises(ConfigError, match="other probabilities each time that it trains"):
        make_policy(checkpoint)


def test_dropout_and_jitter_of_the_configuration_are_0_in_training(checkpoint: Path) -> None:
    settings = load_settings(checkpoint)
    settings.attention_dropout, settings.router_jitter_noise = 0.1, 0.01
    without_noise(settings)
    assert (settings.attention_dropout, settings.router_jitter_noise) == (0.0, 0.0)


@pytest.mark.parametrize(
    "modules", [("q_proj", "lm_head"), ("embed_tokens",), ".*(lm_head|q_proj)"]
)
def test_adapter_on_the_output_layer_is_refused(
    checkpoint: Path, modules: str | tuple[str, ...]
) -> None:
    """The embeddings of the test checkpoint share their weights with its output layer."""
    lora = LoraSettings(rank=2, target_modules=modules)
    with pytest.raises(ConfigError, match=r"output layer \((lm_head|.*embed_tokens)\)"):
        make_policy(checkpoint, lora=lora)
