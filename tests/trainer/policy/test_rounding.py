"""Limits of the difference between trainer and engine, and what each platform refuses."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from transformers import CONFIG_MAPPING

from proxy.engines.vllm_platform import CPU, GPU, EnginePlatform
from trainer.engine import Backend, EnginesConfig, check_platform
from trainer.errors import ConfigError
from trainer.policy.model_config import ModelConfig

MEASURED = {
    "qwen3": (1.4e-2, 4.3e-2),
    "gemma2": (9.9e-3, 4.3e-2),
    "gemma3_text": (8.0e-3, 4.3e-2),
    "mistral": (1.2e-2, 4.3e-2),
    "qwen3_5_text": (2.5e-2, 6e-2),
    "qwen3_moe": (6.8e-2, 0.16),
    "gpt_oss": (6.8e-2, 0.16),
}
"""Class → mean |Δ log p| of right implementations in bfloat16: a random model's, and the probe's
(docs/models.md, docs/notes/results.md)."""


def written(kind: str, folder: Path) -> Path:
    CONFIG_MAPPING[kind]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", MEASURED)
def test_right_implementations_stay_within_the_limits_and_wrong_weights_do_not(
    kind: str, tmp_path: Path
) -> None:
    model = ModelConfig(path=written(kind, tmp_path), compute_dtype="bfloat16")
    sampled, probe = MEASURED[kind]
    config = EnginesConfig()
    assert 2**0.5 * 2 * sampled < config.mismatch_tolerance(model) <= 0.3
    assert 2 * probe < config.probe_tolerance(model) <= 0.5


def test_replayed_experts_are_compared_like_dense_layers(tmp_path: Path) -> None:
    path = written("qwen3_moe", tmp_path)
    replayed = ModelConfig(path=path, compute_dtype="bfloat16", router_replay="replay")
    assert EnginesConfig().mismatch_tolerance(replayed) == 0.06


@pytest.mark.parametrize("kind", MEASURED)
def test_float32_is_exact_on_every_platform(kind: str, tmp_path: Path) -> None:
    model = ModelConfig(path=written(kind, tmp_path), compute_dtype="float32")
    config = EnginesConfig()
    assert config.mismatch_tolerance(model) == config.probe_tolerance(model) == 1e-3
    assert EnginesConfig(dtype="bfloat16").mismatch_tolerance(model) > 1e-2


@pytest.mark.parametrize("kind", MEASURED)
def test_later_steps_in_float32_are_compared_with_the_first_unless_a_rounding_chooses_experts(
    kind: str, tmp_path: Path
) -> None:
    model = ModelConfig(path=written(kind, tmp_path), compute_dtype="float32")
    limits = [EnginesConfig().mismatch_tolerance(model, first) for first in (1e-8, 1e-6, 1e-4)]
    routed = kind in ("qwen3_moe", "gpt_oss")
    assert limits == pytest.approx([1e-3] * 3 if routed else [1e-5, 2e-5, 1e-3])
    assert EnginesConfig(verify_tolerance=0.5).mismatch_tolerance(model, 1e-6) == 0.5
    assert EnginesConfig(dtype="bfloat16").mismatch_tolerance(model, 1e-6) > 1e-2


@pytest.mark.parametrize(
    ("platform", "dtype", "update", "refused"),
    [
        (CPU, "float32", "adapter", False),
        (GPU, "float32", "adapter", True),
        (GPU, "bfloat16", "adapter", False),
        (GPU, "float32", "merged", False),
    ],
)
def test_adapters_in_float32_are_refused_on_gpus(
    tmp_path: Path, platform: EnginePlatform, dtype: str, update: str, refused: bool
) -> None:
    section = {"path": tmp_path, "compute_dtype": dtype, "lora": {"update": update}}
    model = ModelConfig.model_validate(section)
    written("qwen3", tmp_path)
    if not refused:
        return check_platform(EnginesConfig(), model, platform, gpus=None)
    with pytest.raises(ConfigError, match=r"compute_dtype=bfloat16, or model\.lora\.update=merged"):
        check_platform(EnginesConfig(), model, platform, gpus=None)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3"])
def test_latent_attention_in_float32_is_refused_on_gpus(kind: str, tmp_path: Path) -> None:
    path = written(kind, tmp_path)
    low = ModelConfig(path=path, compute_dtype="bfloat16")
    full = ModelConfig(path=path, compute_dtype="float32")
    check_platform(EnginesConfig(), low, GPU, gpus=None)
    check_platform(EnginesConfig(), full, CPU, gpus=None)
    if kind == "qwen3":
        return check_platform(EnginesConfig(), full, GPU, gpus=None)
    with pytest.raises(ConfigError, match="latent attention"):
        check_platform(EnginesConfig(), full, GPU, gpus=None)


@pytest.mark.parametrize(
    ("platform", "gpus", "words"),
    [(CPU, True, "build for CPUs, but PyTorch finds GPUs"), (GPU, False, "finds no GPU here")],
)
def test_build_of_vllm_for_another_machine_is_refused(
    tmp_path: Path, platform: EnginePlatform, gpus: bool, words: str
) -> None:
    model = ModelConfig(path=written("qwen3", tmp_path), compute_dtype="bfloat16")
    check_platform(EnginesConfig(), model, platform, gpus=not gpus)
    with pytest.raises(ConfigError, match=words):
        check_platform(EnginesConfig(), model, platform, gpus=gpus)


@pytest.mark.parametrize("platform", [CPU, GPU])
def test_transport_that_the_platform_does_not_have_is_refused(
    tmp_path: Path, platform: EnginePlatform
) -> None:
    model = ModelConfig(path=written("qwen3", tmp_path), compute_dtype="bfloat16")
    assert EnginesConfig().weight_transfer == platform.transports[0]
    for transport in get_args(Backend):
        engine = EnginesConfig(weight_transfer=transport)
        if transport in platform.transports:
            check_platform(engine, model, platform, gpus=None)
            continue
        with pytest.raises(ConfigError, match="weight_transfer=nccl: vLLM on CPUs receives"):
            check_platform(engine, model, platform, gpus=None)
