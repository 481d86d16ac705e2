"""The configurations of the examples are complete, and the files that they name exist."""

from pathlib import Path

import pytest

from trainer.config_sources import load

ROOT = Path(__file__).parents[2]
CONFIGS = [
    ROOT / "agentic_trainer.yaml",
    ROOT / "examples/quickstart/algorithms.yaml",
    *sorted((ROOT / "examples").glob("*/agentic_trainer.yaml")),
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_loads_and_its_files_exist(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load([path])
    assert (config.model.path / "model.safetensors").is_file()
    assert all(file.is_file() for file in (*config.data.train_files, *config.data.val_files))


def test_no_example_is_left_out() -> None:
    assert {path.parent.name for path in CONFIGS} >= {
        "quickstart",
        "mini_swe_agent",
        "harbor",
        "swarm",
    }
