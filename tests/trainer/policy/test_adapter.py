"""A policy's adapter is read by plain PEFT, and what cannot be sent is refused at load.

Among them are fused experts (`trainer.extras.experts`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from proxy.engines.vllm_server import server_arguments
from tests.trainer.policy.test_policy import make_policy
from tests.trainer.test_fit import config_of
from trainer.cluster.replica_server import replica_server
from trainer.errors import ConfigError
from trainer.policy.adapter import (
    RandomAdapter,
    adapted_modules,
    adapter_arguments,
    adapter_config,
    adapter_tensors,
    save_adapter,
)
from trainer.policy.proof_on_copy import randomize
from trainer.policy.shrink import shrunk
from trainer.run.folder import RunFolder
from trainer.weight_sync.probe import probe_batch

IDS = list(range(1, 40))


def save_small(path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrunk(CONFIG_MAPPING[kind]()))
    randomize(model)
    model.save_pretrained(path)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3_text", "phi3"])
def test_plain_peft_computes_what_the_policy_computes(tmp_path: Path, kind: str) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_small(base, kind)
    policy = make_policy(base, lora={"rank": 3, "alpha": 5.0, "update": "adapter"})
    RandomAdapter(policy.model).enter()
    save_adapter(policy.adapter(), adapter_config(policy.model), folder)
    names = load_file(base / "model.safetensors").keys()
    for name in load_file(folder / "adapter_model.safetensors"):
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        assert f"{module}.weight" in names
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, folder)
    ours = policy.compute_logprobs(probe_batch(IDS), temperature=1.0).logprobs
    torch.testing.assert_close(logprobs_of(adapted), ours, atol=2e-5, rtol=1e-4)
    with adapted.disable_adapter():
        assert (logprobs_of(adapted) - ours).abs().mean() > 1e-2


@torch.no_grad()
def logprobs_of(model: Any) -> torch.Tensor:
    """The log-probabilities of all of IDS but the first."""
    ids = torch.tensor([IDS])
    scores = model(ids).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize(
    ("modules", "named"),
    [(("embed_tokens",), "embed_tokens"), (("q_proj", "lm_head"), "lm_head")],
)
def test_adapter_that_engines_cannot_serve_is_refused_by_name(
    tmp_path: Path, modules: tuple[str, ...], named: str
) -> None:
    settings = shrunk(CONFIG_MAPPING["llama"]())
    settings.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    lora: dict[str, Any] = {"rank": 2, "target_modules": modules, "update": "adapter"}
    with pytest.raises(ConfigError, match=named):
        make_policy(tmp_path, lora=lora)
    if named == "embed_tokens":
        make_policy(tmp_path, lora={**lora, "update": "merged"})


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("update", ["adapter", "merged"])
def test_adapter_on_fused_experts_is_refused_by_name(tmp_path: Path, update: str) -> None:
    """PEFT also puts adapters on experts for `all-linear`, and nothing would merge them."""
    save_small(tmp_path, "qwen3_moe")
    with pytest.raises(ConfigError, match=r"adapter on model\.layers\.0\.mlp\.experts"):
        make_policy(tmp_path, lora={"rank": 2, "update": update})
    attention = ("q_proj", "o_proj")
    make_policy(tmp_path, lora={"rank": 2, "update": update, "target_modules": attention})


def test_update_has_at_most_two_percent_of_the_bytes_of_the_weights() -> None:
    """With the shapes of Qwen3-0.6B and rank 16 on all linear layers."""
    settings = CONFIG_MAPPING["qwen3"](
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
        weights = sum(weight.nbytes for weight in model.parameters())
        lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        adapter = sum(tensor.nbytes for _, tensor in adapter_tensors(get_peft_model(model, lora)))
    assert adapter / weights == pytest.approx(0.017, abs=0.0005)


def test_random_adapter_changes_every_module_until_it_leaves(checkpoint: Path) -> None:
    policy = make_policy(checkpoint, lora={"rank": 2})
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in adapter_tensors(policy.model)}
    random = RandomAdapter(policy.model)
    random.enter()
    changed = {
        name for name, tensor in adapter_tensors(policy.model) if not tensor.equal(before[name])
    }
    assert len(changed) == len(list(adapted_modules(policy.model)))
    random.leave()
    for name, tensor in adapter_tensors(policy.model):
        assert tensor.equal(before[name])
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("phi3", "down_proj gate_up_proj o_proj qkv_proj"),
    ],
)
def test_engines_adapt_the_linear_layers_but_not_the_output_layer(
    tmp_path: Path, kind: str, layers: str
) -> None:
    settings = shrunk(CONFIG_MAPPING[kind]())
    settings.tie_word_embeddings = False
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    assert adapter_arguments(tmp_path) == ["--lora-target-modules", *layers.split()]
    lora = {"rank": 2, "update": "adapter", "policy": "planner"}
    config = config_of(tmp_path, model={"lora": lora}, engine={"args": ["--seed", "1"]})
    made = replica_server(config, RunFolder.create(tmp_path / "run"), 0)
    assert isinstance(made, partial)
    argv = server_arguments(made.args[0])
    assert argv[argv.index("--max-lora-rank") + 1] == "8"
    assert argv[-2:] == ["--seed", "1"]
    assert argv[argv.index("--lora-target-modules") + 1 : -2] == layers.split()
