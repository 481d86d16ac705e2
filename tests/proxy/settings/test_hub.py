"""Checkpoints by their names on the hub: what is downloaded, and errors in one line."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.settings.hub import hub_name, model_folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the hub's client was asked for; its answer is the test's folder."""
    asked: dict[str, Any] = {}

    def download(repository: str, **more: Any) -> str:
        asked.update(more, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_checkpoint_of_the_hub_is_its_downloaded_folder(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    config = load_config(None, model="hf://small/model@v2")
    assert (config.model, config.served_model_name) == (tmp_path, "small/model")
    assert (asked["repository"], asked["revision"]) == ("small/model", "v2")
    assert "*.safetensors" in asked["allow_patterns"]


def test_name_that_the_hub_refuses_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigurationError, match=r"hf://a/b/c: the hub refuses it: ") as error:
        model_folder(Path("hf://a/b/c"))
    assert "\n" not in str(error.value)


def test_hub_that_cannot_be_reached_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = r"^hf://small/model: the Hugging Face hub cannot be reached; download the model"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ConfigurationError, match=expected) as error:
            load_config(None, model="hf://small/model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["/models/a", "models/a", "hf", "."])
def test_folder_is_not_a_name_on_the_hub(path: str) -> None:
    assert hub_name(Path(path)) is None
    assert model_folder(Path(path)) == Path(path)


def test_checkpoint_of_a_run_is_served_by_the_name_of_its_step(tmp_path: Path) -> None:
    step = tmp_path / "step-000036"
    (step / "model").mkdir(parents=True)
    assert model_folder(step) == step  # nothing in it is a model
    (step / "model" / "config.json").write_text("{}")
    config = load_config(None, model=step)
    assert (config.model, config.served_model_name) == (step / "model", "step-000036")
    (step / "config.json").write_text("{}")
    assert model_folder(step) == step
