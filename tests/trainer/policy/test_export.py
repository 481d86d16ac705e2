"""What is exported has the names, shapes and values of the source checkpoint, buffers included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.trainer.policy.architectures import ARCHITECTURES, Architecture
from tests.trainer.policy.test_policy import make_policy, plain_logprobs
from trainer.batch import Batch
from trainer.checkpoint import _export, as_in_source, with_untrained
from trainer.errors import ConfigError
from trainer.policy import loading
from trainer.policy.architecture import without_noise
from trainer.policy.export import check_names, checkpoint_tensors
from trainer.policy.loading import load_weights
from trainer.policy.policy import Policy
from trainer.policy.proof_on_copy import _paths, randomize
from trainer.policy.shrink import shrunk


def saved(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes a small random checkpoint under the published names; returns its tensors."""
    settings = shrunk(CONFIG_MAPPING[kind]())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings)
    randomize(model)
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.7.down_proj.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.0.w1.weight"),
        ("deepseek_v3", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("gemma4_text", "model.layers.0.layer_scalar"),
    ],
)
def test_exported_tensors_are_those_of_the_source_checkpoint(
    tmp_path: Path, kind: str, name: str
) -> None:
    source = saved(tmp_path, kind)
    assert name in source
    exported = dict(make_policy(tmp_path).named_hf_parameters())
    assert exported.keys() == source.keys()
    for key, tensor in source.items():
        torch.testing.assert_close(exported[key], tensor, msg=key)


@pytest.mark.parametrize("place", [None, lambda _: None], ids=["at once", "layer by layer"])
@pytest.mark.parametrize("published", [True, False], ids=["published", "renamed"])
def test_layers_that_the_checkpoint_names_as_the_model_does_keep_their_names(
    tmp_path: Path, published: bool, place: Any
) -> None:
    """AI2's OLMo Hybrid has other names for the norms of linear layers only; transformers would
    write them in all layers."""
    others = {"attention_layer_norm": "input_layernorm"}
    others["feedforward_layer_norm"] = "post_attention_layernorm"
    source = {}
    for name, tensor in saved(tmp_path, "olmo_hybrid").items():
        if not published or ".layers.3." in name:  # the one with full attention
            for written, own in others.items():
                name = name.replace(written, own)
        source[name] = tensor
    save_file(source, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert published == ("model.layers.0.attention_layer_norm.weight" in source)
    model = load_weights(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32, place=place)
    check_names(model, tmp_path)
    exported = dict(checkpoint_tensors(model))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in source.items())


def test_names_that_the_checkpoint_does_not_have_are_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "qwen3")
    others = frozenset({"model.norm.weight"})
    monkeypatch.setattr(loading, "_names", lambda _: others)
    why = r"24 weights, such as lm_head\.weight, would get names that the checkpoint does not have"
    with pytest.raises(ConfigError, match=why):
        make_policy(tmp_path)


def test_merged_adapters_have_the_names_of_the_source_checkpoint(tmp_path: Path) -> None:
    source = saved(tmp_path, "qwen3_moe")
    lora: dict[str, Any] = {"rank": 2, "target_modules": ("q_proj", "o_proj")}
    policy = make_policy(tmp_path, lora=lora)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if ".lora_" in name:
                weight.fill_(0.1)
    exported = dict(policy.named_hf_parameters())
    assert exported.keys() == source.keys()
    changed = {key for key, tensor in source.items() if not torch.equal(exported[key], tensor)}
    assert {key.split(".")[-2] for key in changed} == {"q_proj", "o_proj"}


def test_export_keeps_the_vision_tower_and_mtp_layers_of_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint as Qwen3.5 is published: its class, its prefix, and tensors that are not
    trained."""
    whole = CONFIG_MAPPING["qwen3_5"]()
    whole.text_config = shrunk(whole)
    for name, size in {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
    }.items():
        setattr(whole.vision_config, name, size)
    whole.vision_config.out_hidden_size = whole.text_config.hidden_size
    model = AutoModelForImageTextToText.from_config(whole)
    randomize(model)
    source, exported = tmp_path / "source", tmp_path / "exported"
    model.save_pretrained(source)
    tensors = load_file(source / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert {name.split(".")[1] for name in tensors} >= {"visual", "language_model"}

    policy = make_policy(source)
    trained = dict(policy.named_hf_parameters())
    assert {name.split(".")[1] for name in trained} == {"language_model", "weight"}
    exported.mkdir()
    save_file(dict(with_untrained(trained.items(), source)), exported / "model.safetensors")
    again = load_file(exported / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(again[name], tensor, msg=name)


def test_stale_copy_of_a_tied_output_layer_is_not_exported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    stale = {"lm_head.weight": torch.zeros(2), "mtp.weight": torch.ones(2)}
    save_file(stale, tmp_path / "model.safetensors")
    ours = [("model.embed_tokens.weight", torch.ones(2))]
    names = [name for name, _ in with_untrained(ours, tmp_path)]
    assert names == ["model.embed_tokens.weight", "mtp.weight"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if not a.refused], ids=lambda each: each.title
)
def test_export_of_every_architecture_is_the_trained_model_in_transformers(
    tmp_path: Path, architecture: Architecture
) -> None:
    """Small random weights of its text model are changed, exported, and read by transformers, whose
    own code gives the trainer's log-probabilities."""
    source, exported = tmp_path / "source", tmp_path / "exported"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrunk(without_noise(architecture.settings())))
    randomize(model)
    model.save_pretrained(source)
    policy, batch = make_policy(source), _paths()
    before = logprobs(policy, batch)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter *= 1 + 0.1 * torch.randn_like(parameter)
    trained = logprobs(policy, batch)
    assert float((trained - before).abs().max()) > 1e-2

    exported.mkdir()
    whole = with_untrained(policy.named_hf_parameters(), source)
    _export(as_in_source(whole, source), source, exported)
    ours, theirs = (
        {
            name: (tensor.shape, tensor.dtype)
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for folder in (exported, source)
    )
    assert ours == theirs
    _, read = plain_logprobs(exported, batch, 1.0)
    torch.testing.assert_close(read.detach(), trained, atol=1e-4, rtol=1e-4)


def logprobs(policy: Policy, batch: Batch) -> torch.Tensor:
    return policy.compute_logprobs(batch, temperature=1.0).logprobs
