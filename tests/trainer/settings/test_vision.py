"""What is not computed exactly of images is refused by name, before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING

from trainer.cli import main


def checkpoint(folder: Path, kind: str, tiny_model: Path) -> Path:
    """A checkpoint without weights."""
    CONFIG_MAPPING[kind]().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model / name).is_file():
            shutil.copyfile(tiny_model / name, folder / name)
    return folder


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    """A configuration of a model that reads images."""
    checkpoint(tmp_path / "qwen3_vl", "qwen3_vl", tiny_model)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"task_id": "a", "prompt": "say a"}) + "\n")
    settings = {
        "model": {"path": str(tmp_path / "qwen3_vl"), "vision": "frozen"},
        "data": {"train_files": [str(tmp_path / "tasks.jsonl")]},
        "remote_agent": {"command": {"argv": ["true"]}},
        "trainer": {"run_dir": str(tmp_path / "run"), "device": "cpu"},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "config.yaml"


def said(config: Path, capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["--config", str(config), "--check", *words]) == 2
    return capfd.readouterr().err


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model.router_replay=replay"], "router_replay=replay"),
        (["model.router_aux_loss=0.1"], "router_aux_loss=0.1"),
        (["trainer.ranks=2", "trainer.tensor_parallel=2"], "trainer.tensor_parallel"),
        (["trainer.ranks=2", "trainer.pipeline_parallel=2"], "trainer.pipeline_parallel"),
        (["trainer.ranks=2", "trainer.expert_parallel=2"], "trainer.expert_parallel"),
    ],
)
def test_routing_and_divided_models_are_refused_with_images(
    config: Path, capfd: pytest.CaptureFixture[str], vision: str, words: list[str], key: str
) -> None:
    text = said(config, capfd, f"model.vision={vision}", *words)
    assert f"vision={vision}: not supported with {key}; remove one of them" in text


def test_trained_tower_is_refused_where_it_would_not_be_trained(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = said(config, capfd, "model.vision=trained", "model.lora.rank=2")
    assert "adapters are on the language part only; set vision=frozen" in text
    assert main(["--config", str(config), "--check", "model.lora.rank=2"]) == 0


@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize(
    "words", [(), ("trainer.context_parallel=2",), ("trainer.weight_copies=2",)]
)
def test_ranks_that_keep_the_tower_whole_are_accepted(
    config: Path, vision: str, words: tuple[str, ...]
) -> None:
    settings = [f"model.vision={vision}", "trainer.ranks=2", *words]
    assert main(["--config", str(config), "--check", *settings]) == 0


def test_gemma_3_is_accepted_with_images(config: Path, tiny_model: Path) -> None:
    folder = checkpoint(config.parent / "gemma3", "gemma3", tiny_model)
    assert main(["--config", str(config), "--check", f"model.path={folder}"]) == 0


def test_gemma4_is_refused_with_images(
    config: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(config.parent / "gemma4", "gemma4", tiny_model)
    text = said(config, capfd, f"model.path={folder}")
    assert (
        "gemma4: the tokens of an image see each other in it, which rows compute of gemma3 alone"
        in text
    )
    assert "set model.vision=text" in text
    as_text = [f"model.path={folder}", "model.vision=text"]
    assert main(["--config", str(config), "--check", *as_text]) == 0
