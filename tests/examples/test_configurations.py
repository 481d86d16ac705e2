"""The configurations of the examples are complete, and the files that they name exist."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.images.lessons import ASK_CLAUDE_CODE
from proxy.commands.agent_environment import AgentProgram
from trainer.algorithms.presets import PRESETS
from trainer.config import TrainerConfig
from trainer.settings.sources import dump, dump_changed, load

ROOT = Path(__file__).parents[2]
CONFIGS = [
    ROOT / "agentic_trainer.yaml",
    ROOT / "examples/quickstart/algorithms.yaml",
    *sorted((ROOT / "examples").glob("*/agentic_trainer.yaml")),
    *sorted((ROOT / "examples/environments").glob("*.yaml")),
    *sorted((ROOT / "benchmarks").glob("*/agentic_trainer.yaml")),
]
MADE = {
    ROOT / "examples/pretrained/agentic_trainer.yaml": Path(".cache/pretrained/model"),
    ROOT / "examples/images/agentic_trainer.yaml": Path(".cache/images/model"),
}
"""Configurations of models that are not in the repository → the folder in which each is made."""
LAYERS = [
    ROOT / "examples/quickstart/adapter.yaml",
    ROOT / "examples/quickstart/planner_coder.yaml",
    ROOT / "examples/judge/judge.yaml",
]
"""Files that are given after agentic_trainer.yaml."""
OVER_IMAGES = ROOT / "examples/images/claude_code.yaml"
"""The layer that is given after examples/images/agentic_trainer.yaml."""
RECIPES = sorted((ROOT / "examples/recipes").rglob("*.yaml"))
"""Layers that `tests/examples/test_recipes.py` loads in every composition."""
AGENTS = sorted((ROOT / "examples/agents").glob("*.yaml"))
OF_AGENTS = [
    ROOT / "examples/mini_swe_agent/prompts.yaml",
    ROOT / "examples/swe_agent/config.yaml",
]
"""Files that an agent reads itself; tests/examples/test_mini_swe_agent.py and
tests/e2e/agents/swe_agent.py start them with these."""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_loads_and_its_files_exist(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load([path])
    if path in MADE:
        assert config.model.path == MADE[path]
    else:
        assert (config.model.path / "model.safetensors").is_file()
    assert all(file.is_file() for file in (*config.data.train_files, *config.data.val_files))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_in_a_run_folder_is_read_back_equal(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the run can be resumed."""
    monkeypatch.chdir(ROOT)
    config = load([path])
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(config))
    assert load([saved]) == config
    short = dump_changed(config)
    assert len(short) < len(dump(config)) / 2
    saved.write_text(short)
    assert load([saved]) == config


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_is_not_a_default_is_the_whole_configuration(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    saved = tmp_path / "config.yaml"
    values = yaml.safe_load((ROOT / "agentic_trainer.yaml").read_text())
    saved.write_text(yaml.safe_dump(values | {"algorithm": {"preset": preset}}))
    config = load([saved])
    saved.write_text(dump_changed(config))
    assert load([saved]) == config


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_layer_loads_over_the_quickstart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    quickstart = ROOT / "agentic_trainer.yaml"
    alone, layered = load([quickstart]), load([quickstart, path])
    assert layered != alone
    assert layered.data == alone.data


def test_claude_code_looks_at_the_screens_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load([ROOT / "examples/images/agentic_trainer.yaml", OVER_IMAGES])
    assert config.remote_agent.command is not None
    assert ASK_CLAUDE_CODE in config.remote_agent.command.argv
    assert config.model.vision == "trained"


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_file_of_an_agent_is_part_of_a_configuration(path: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    for_commands = values.pop("run", {})
    own = for_commands.pop("own", None)
    config = TrainerConfig.model_validate({"model": {"path": "/models/qwen3"}, **values})
    assert values.keys() <= {"remote_agent", "proxy_server"}
    assert config.remote_agent.command is not None
    program = for_commands.pop("program", config.remote_agent.command.argv[0])
    AgentProgram(path.stem, program, **for_commands)
    assert own is None or AgentProgram(path.stem, program, **own)


def test_every_yaml_file_of_the_examples_is_loaded_by_a_test() -> None:
    assert {*(ROOT / "examples").rglob("*.yaml")} <= {
        *CONFIGS,
        *LAYERS,
        *RECIPES,
        *AGENTS,
        *OF_AGENTS,
        OVER_IMAGES,
    }


def test_no_example_is_left_out() -> None:
    assert {path.parent.name for path in CONFIGS} >= {
        "quickstart",
        "mini_swe_agent",
        "harbor",
        "swarm",
    }
