"""Quantised checkpoints are refused by the name of their method, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.errors import ConfigError
from trainer.policy.model_config import QUANTISED_BESIDE, load_settings

METHODS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}},
    "torchao": {"quant_method": "torchao", "quant_type": "int4_weight_only"},
    "modelopt": {"quant_library": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
    "quark": {"quant_method": "quark"},
    "unknown method": {},
}


def quantised(tiny_model: Path, tmp_path: Path, key: str, value: dict[str, Any]) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    return folder


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", METHODS)
def test_quantised_checkpoint_is_refused_by_its_method(
    method: str, key: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = quantised(tiny_model, tmp_path, key, METHODS[method])
    with pytest.raises(ConfigError, match=rf"teacher: .* is quantised \({key}: {method}\)"):
        load_settings(folder, "teacher")


@pytest.mark.parametrize("name", QUANTISED_BESIDE)
def test_checkpoint_with_a_file_of_its_quantisation_is_refused(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / name).write_text('{"bits": 4}')
    with pytest.raises(ConfigError, match=rf"model\.path: .* is quantised \({name} says how\)"):
        load_settings(folder)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint16])
def test_weights_of_a_type_that_is_not_trained_are_refused(
    kind: torch.dtype, tiny_model: Path, tmp_path: Path
) -> None:
    """Though nothing says that they are quantised."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    name = next(each for each in weights if each.endswith("q_proj.weight"))
    save_file(weights | {name: weights[name].to(kind)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} is .*, and weights of that type are not"):
        load_settings(folder)


def test_checkpoint_that_says_that_it_is_not_quantised_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = quantised(tiny_model, tmp_path, "quantization_config", None)  # type: ignore[arg-type]
    assert load_settings(folder).vocab_size
