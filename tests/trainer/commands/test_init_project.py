"""`agentic-train init` writes projects that pass `--check` at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from trainer.cli import main
from trainer.commands.init_project import EXAMPLES, kinds
from trainer.settings.sources import load
from trainer.settings.values import Sources
from trainer.start import check_only

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("agent", kinds())
def test_written_project_passes_the_check(
    agent: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, project = tmp_path / "new" / "project", kinds()[agent]
    model = [] if project.has_model else ["--model", str(tiny_model)]
    assert main(["init", str(folder), "--agent", agent, *model]) == 0
    monkeypatch.chdir(folder)
    config = load([Path("agentic_trainer.yaml")])
    if config.remote_agent.command is not None:
        _install(config.remote_agent.command.argv[0], tmp_path / "bin", monkeypatch)
    check_only(Sources([Path("agentic_trainer.yaml")], ["trainer.device=cpu"], {}))
    assert config.remote_agent.private_files == [folder / "verify.py"]


def test_small_project_is_the_quickstart(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path / "new")]) == 0
    text = (tmp_path / "new/agentic_trainer.yaml").read_text()
    quickstart = (ROOT / "agentic_trainer.yaml").read_text().replace("examples/quickstart/", "")
    wanted = yaml.safe_load(quickstart)
    wanted["trainer"]["run_dir"] = "runs/first"
    assert yaml.safe_load(text) == wanted


def test_folder_that_cannot_be_made_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "project"
    assert main(["init", str(folder)]) == 2
    said = f"agentic-train init: {folder}: cannot be written (Not a directory); choose a folder"
    assert capfd.readouterr().err.startswith(said)


def test_every_example_agent_is_a_kind() -> None:
    stems = {file.stem.replace("_", "-") for file in (EXAMPLES / "agents").glob("*.yaml")}
    assert stems | {"openai", "command"} == set(kinds())
    installed = [kind.install for name, kind in kinds().items() if name in stems]
    assert "npm install -g @anthropic-ai/claude-code" in installed
    assert "pip install mini-swe-agent" in installed
    assert all(installed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent", "clod"], "--agent clod: unknown; choose one of openai, command, aider"),
        (["--agent", "claude-code"], "--model: missing; --agent claude-code needs the folder"),
        (["--model", "/no/such/model"], "--model /no/such/model: has no config.json"),
    ],
)
def test_what_cannot_be_written_is_refused_with_a_remedy(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "new"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_folder_with_files_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").touch()
    assert main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path}: exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def _install(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a program of this name on PATH; the check only looks whether it is there."""
    if "{" in program:
        return
    folder.mkdir()
    (folder / program).write_text("#!/bin/sh\n")
    (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
