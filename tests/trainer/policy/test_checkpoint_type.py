"""The type of a checkpoint is the default of `model.compute_dtype`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.policy.checkpoint_type import checkpoint_type
from trainer.policy.model_config import ModelConfig
from trainer.settings.sources import load

QUICKSTART = Path("agentic_trainer.yaml")


def checkpoint(folder: Path, settings: Any, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),  # transformers before 5
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "float64"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),  # with a vision tower
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, "float32"),
        ({"dtype": None, "text_config": {"torch_dtype": "float32"}}, "float32"),
        ({"dtype": "auto"}, "float32"),
        ({}, "float32"),
        ([], "float32"),
    ],
)
def test_type_is_that_of_config_json(tmp_path: Path, settings: Any, expected: str) -> None:
    assert checkpoint_type(checkpoint(tmp_path, settings)) == expected


def test_weights_say_their_type_if_config_json_does_not(tmp_path: Path) -> None:
    low = torch.zeros(9, dtype=torch.bfloat16)
    checkpoint(
        tmp_path, {}, norm=torch.zeros(2), experts=low, ids=torch.zeros(99, dtype=torch.int64)
    )
    assert checkpoint_type(tmp_path) == "bfloat16"
    save_file({"more": torch.zeros(9)}, tmp_path / "model-2.safetensors")
    assert checkpoint_type(tmp_path) == "bfloat16"  # nobody loads a file beside the whole model
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    assert checkpoint_type(tmp_path) == "float32"


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]", b"not a header"])
def test_damaged_weights_do_not_end_the_reading(tmp_path: Path, content: bytes) -> None:
    checkpoint(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(content)
    assert checkpoint_type(tmp_path) == "float32"


def test_damaged_or_missing_config_json_does_not_end_the_reading(tmp_path: Path) -> None:
    assert checkpoint_type(tmp_path / "none") == "float32"
    (tmp_path / "config.json").write_bytes(b"\xff{")
    assert checkpoint_type(tmp_path) == "float32"


def test_compute_dtype_is_by_default_the_checkpoints(tmp_path: Path) -> None:
    low = checkpoint(tmp_path / "low", {"dtype": "bfloat16"})
    full = checkpoint(tmp_path / "full", {"dtype": "float32"})
    assert ModelConfig(path=low).compute_dtype == "bfloat16"
    assert ModelConfig(path=full).compute_dtype == "float32"
    assert ModelConfig(path=low, compute_dtype="float32").compute_dtype == "float32"
    assert ModelConfig(path=full, weights_dtype="bfloat16").compute_dtype == "bfloat16"


def test_quickstart_computes_in_float32() -> None:
    config = load([QUICKSTART])
    assert (config.model.compute_dtype, config.engine.served_dtype(config.model)) == (
        "float32",
        "float32",
    )


def test_model_of_the_hub_gets_the_type_of_the_downloaded_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded = checkpoint(tmp_path / "snapshot", {"dtype": "bfloat16"})
    monkeypatch.setattr("proxy.settings.hub.download", lambda *_: downloaded)
    words = ["model.path=hf://Qwen/Qwen3-0.6B"]
    assert load([QUICKSTART], words).model.compute_dtype == "bfloat16"
    words += ["model.compute_dtype=float32"]
    assert load([QUICKSTART], words).model.compute_dtype == "float32"


def test_saved_checkpoint_of_a_run_has_its_own_type(tmp_path: Path) -> None:
    checkpoint(tmp_path / "step-000001", {"dtype": "float32"})  # no config.json of its own
    (tmp_path / "step-000001" / "config.json").unlink()
    saved = checkpoint(tmp_path / "step-000001" / "model", {"dtype": "bfloat16"})
    words = [f"model.path={saved.parent}"]
    assert load([QUICKSTART], words).model.compute_dtype == "bfloat16"
