"""Weights that are read layer by layer are those of the checkpoint; missing ones are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.trainer.policy.architectures import ARCHITECTURES
from tests.trainer.policy.forked_ranks import run_ranks
from tests.trainer.policy.test_export import saved
from tests.trainer.policy.test_policy import assert_described
from trainer.errors import ConfigError
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.critic import Critic
from trainer.policy.export import checkpoint_tensors
from trainer.policy.loading import load_weights
from trainer.policy.model import blocks, load_model
from trainer.policy.model_config import LoraSettings, ModelConfig, load_settings
from trainer.policy.parallel import Ranks
from trainer.policy.policy import Policy

TRAINED = sorted({each.kind for each in ARCHITECTURES if not each.refused})


def tensors(model: Any) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("kind", TRAINED)
def test_layers_read_one_by_one_are_the_same_model(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, kind)
    settings = load_settings(tmp_path)
    at_once = load_weights(tmp_path, settings, torch.float32)
    whole: list[weakref.ref[Tensor]] = []
    placed: list[int] = []

    def place(layer: nn.Module) -> None:
        """Replaces the weights, as FSDP2 does. The earlier layers' whole weights are gone."""
        assert all(weight() is None for weight in whole)
        placed.append(sum(not weight.is_meta for weight in layer.parameters()))
        for module in layer.modules():
            for name, weight in module.named_parameters(recurse=False):
                whole.append(weakref.ref(weight))
                module.register_parameter(name, nn.Parameter(weight.detach().clone()))

    model = load_weights(tmp_path, settings, torch.float32, place=place)
    assert placed == [len(list(layer.parameters())) for layer in blocks(at_once)]
    expected, found = tensors(at_once), tensors(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    theirs, ours = dict(checkpoint_tensors(at_once)), dict(checkpoint_tensors(model))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


LORA = LoraSettings(rank=2, target_modules=("q_proj", "o_proj", "down_proj"), update="adapter")


@pytest.mark.parametrize("kind", ["gemma2", "llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_layers_read_one_by_one_are_those_of_a_whole_model(
    tmp_path: Path, kind: str, dtype: Any
) -> None:
    saved(tmp_path, kind)
    config = ModelConfig(path=tmp_path, lora=LORA, compute_dtype=dtype, weights_dtype=dtype)
    torch.manual_seed(7)
    at_once = load_model(config)
    placed: list[list[str]] = []

    def place(layer: nn.Module) -> None:
        assert not [name for name, weight in layer.named_parameters() if weight.is_meta]
        placed.append([name for name, weight in layer.named_parameters() if weight.requires_grad])

    torch.manual_seed(7)
    model = load_model(config, place=place)
    expected, found = tensors(at_once), tensors(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.requires_grad == expected[name].requires_grad, name
    trained = {name for name, weight in at_once.named_parameters() if weight.requires_grad}
    assert len(trained) == sum(map(len, placed)) > 0


def test_adapters_of_a_checkpoint_that_is_not_in_safetensors_are_those_of_a_whole_model(
    tmp_path: Path,
) -> None:
    saved(tmp_path, "qwen3")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    config = ModelConfig(path=tmp_path, lora=LORA)
    torch.manual_seed(7)
    expected = tensors(load_model(config))
    torch.manual_seed(7)
    found = tensors(load_model(config, place=lambda layer: None))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def worker(rank: int, folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    ranks = Ranks.of_process_group("cpu")
    weights = {}
    for kind in kinds:
        config = ModelConfig(path=folder / kind)
        for name, optimizer in (("trained", OptimizerConfig()), ("frozen", None)):
            policy = Policy(config, optimizer, ranks=ranks)
            assert all(isinstance(p, DTensor) for p in policy.model.parameters())
            assert all(p.requires_grad == bool(optimizer) for p in policy.model.parameters())
            weights[kind, name] = dict(policy.named_hf_parameters())
            assert_described(policy, weights[kind, name])
    if rank == 0:
        torch.save(weights, folder / "weights.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_hold_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """Tied embeddings, fused experts, buffers, and a hybrid."""
    kinds = ["gemma2", "qwen3_moe", "deepseek_v3", "qwen3_5"]
    sources = {kind: saved(tmp_path / kind, kind) for kind in kinds}
    run_ranks(worker, tmp_path, kinds, ranks=2)
    for (kind, _), found in torch.load(tmp_path / "weights.pt").items():
        assert found.keys() == sources[kind].keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, sources[kind][name]), name


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of the checkpoint."""
    held = load_file(path / "model.safetensors")
    change(held)
    save_file(held, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("lacks", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_checkpoint_that_lacks_a_weight_is_refused(
    tmp_path: Path, lacks: str, placed: bool
) -> None:
    saved(tmp_path, "qwen3")
    rewritten(tmp_path, lambda held: held.pop(lacks))
    with pytest.raises(ConfigError, match=f"lacks 1 of the model's weights, such as {lacks}"):
        load_model(ModelConfig(path=tmp_path), place=(lambda layer: None) if placed else None)


@pytest.mark.parametrize("placed", [False, True])
def test_checkpoint_with_a_weight_of_another_shape_is_refused(tmp_path: Path, placed: bool) -> None:
    saved(tmp_path, "qwen3")
    name = "model.layers.0.mlp.down_proj.weight"
    rewritten(tmp_path, lambda held: held.update({name: held[name][:, :-1].contiguous()}))
    with pytest.raises(ConfigError, match=f"{name} has the shape"):
        load_model(ModelConfig(path=tmp_path), place=(lambda layer: None) if placed else None)


def test_weights_of_two_types_are_not_sharded(tmp_path: Path) -> None:
    saved(tmp_path, "olmo_hybrid")
    config = ModelConfig(path=tmp_path, compute_dtype="bfloat16", weights_dtype="bfloat16")
    load_model(config)
    with pytest.raises(ConfigError, match=r"keeps .*A_log in float32.*weights_dtype=float32"):
        load_model(config, place=lambda layer: None)


def test_critic_needs_no_output_layer(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    rewritten(tmp_path, lambda held: held.pop("lm_head.weight"))
    config = ModelConfig(path=tmp_path)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        Policy(config)
    Critic(config, OptimizerConfig())
