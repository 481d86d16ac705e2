"""Quantised checkpoints are refused by the name of their method, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ConfigError
from trainer.policy.model_config import load_settings

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


def test_checkpoint_that_says_that_it_is_not_quantised_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = quantised(tiny_model, tmp_path, "quantization_config", None)  # type: ignore[arg-type]
    assert load_settings(folder).vocab_size
