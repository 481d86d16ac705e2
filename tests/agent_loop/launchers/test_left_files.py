"""What of an agent's working directory a judge gets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from agent_loop.launchers import left_files
from agent_loop.launchers.left_files import copy_left, keep_configuration, remove_folder
from agent_loop.processes.readable import declared, imported, readable
from agent_loop.rewards.verifier import VerifierConfig
from agent_loop.trial.config import TrialConfig
from proxy.errors import ConfigurationError
from proxy.wall import SYSTEM


def test_settings_of_tools_are_those_that_the_trial_began_with(tmp_path: Path) -> None:
    work, kept, copy = (tmp_path / name for name in ("work", "kept", "copy"))
    (work / "tests").mkdir(parents=True)
    copy.mkdir()
    (work / "tests" / "conftest.py").write_text("given")
    (work / "pyproject.toml").write_text("given")
    keep_configuration(work, kept)
    (work / "tests" / "conftest.py").write_text("forged")
    (work / "conftest.py").write_text("forged")
    (work / "pyproject.toml").write_text("the work")
    for tests, project in ((False, "the work"), (True, "given")):
        copy_left(work, work, kept, copy / str(tests), tests=tests)
        assert (copy / str(tests) / "tests" / "conftest.py").read_text() == "given"
        assert not (copy / str(tests) / "conftest.py").exists()
        assert (copy / str(tests) / "pyproject.toml").read_text() == project


def test_compiled_modules_and_settings_of_a_folder_are_left_out(tmp_path: Path) -> None:
    work, kept = tmp_path / "work", tmp_path / "kept"
    (work / ".cargo").mkdir(parents=True)
    (work / ".cargo" / "config.toml").write_text("given")
    keep_configuration(work, kept)
    forged = ("a/__pycache__/b.cpython-311.pyc", "a/.cargo/config", "a/config.toml")
    for name in (*forged, ".cargo/config.toml"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("forged")
    (work / "__pycache__").symlink_to("a/__pycache__")
    (work / "linked").mkdir()
    (work / "linked" / ".cargo").symlink_to("../a")
    copy_left(work, work, kept, tmp_path / "copy", tests=False)
    left = {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*")}
    folders = {"a", "a/.cargo", "linked", ".cargo"}
    assert left == {*folders, "a/config.toml", ".cargo/config.toml"}
    assert (tmp_path / "copy" / ".cargo" / "config.toml").read_text() == "given"


def test_repository_keeps_its_history_and_its_harmless_settings(tmp_path: Path) -> None:
    work = tmp_path / "work"
    git = ["git", "-C", str(work)]
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    (work / "file").write_text("text")
    for command in (
        ["add", "file"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-q", "-m", "first"],
        ["config", "user.name", "agent"],
        ["config", "core.pager", "evil"],
        ["config", "include.path", "evil"],
    ):
        subprocess.run([*git, *command], check=True)
    copy_left(work, work, tmp_path / "kept", tmp_path / "copy", tests=False)
    settings = (tmp_path / "copy" / ".git" / "config").read_text()
    assert "evil" not in settings
    assert "name = agent" in settings
    log = ["git", "-C", str(tmp_path / "copy"), "log", "--format=%s"]
    assert subprocess.run(log, capture_output=True, text=True).stdout == "first\n"


def test_links_within_the_directory_and_to_the_system_stay(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    (work / "file").write_text("text")
    (work / "folder" / "up").symlink_to("../file")
    (work / "own").symlink_to(work / "file")
    (work / "seen").symlink_to("/seen/work/file")
    (work / "system").symlink_to("/usr/bin/env")
    (work / "out").symlink_to("../secret")
    copy_left(work, Path("/seen/work"), tmp_path / "kept", tmp_path / "copy", tests=False)
    links = {path.name for path in (tmp_path / "copy").rglob("*") if path.is_symlink()}
    assert links == {"up", "own", "seen", "system"}


def test_script_is_shown_with_what_it_imports_and_not_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def main():\n    from parts import tool\n")
    (tmp_path / "parts").mkdir()
    for name in ("parts/__init__.py", "parts/tool.py", "parts/other.py", "verify.py"):
        (tmp_path / name).write_text("")
    found = imported(tmp_path / "agent.py")
    names = {str(path.relative_to(tmp_path)) for path in found}
    assert names == {"agent.py", "parts/__init__.py", "parts/tool.py"}


def test_script_of_node_is_shown_with_what_it_imports(tmp_path: Path) -> None:
    texts = {
        "agent/agent.mjs": "import { a } from './a.mjs';\nexport * from '../shared/b';\n"
        "import fs from 'node:fs';",
        "agent/a.mjs": 'const c = require("./c"); await import("./d.js"); import "./agent.mjs";',
        "agent/c/index.cjs": "",
        "agent/d.ts": "",
        "agent/package.json": "{}",
        "agent/verify.mjs": "",
        "shared/b.js": 'import data from "./data.json" with { type: "json" };',
        "shared/data.json": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = imported(tmp_path / "agent/agent.mjs")
    names = {str(path.relative_to(tmp_path)) for path in found}
    assert names == set(texts) - {"agent/verify.mjs"}


def test_what_an_agent_wrote_shows_nothing(tmp_path: Path) -> None:
    """A judge's command line may name a file of the working directory."""
    work = tmp_path / "trial" / "work"
    work.mkdir(parents=True)
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "secret.py").write_text("")
    (work / "test.mjs").write_text('import "../../secret.json";')
    (work / "test.py").write_text("from ... import secret")
    for name in ("test.mjs", "test.py"):
        argv = ["env", str(work / name)]
        found = readable(argv, {"PATH": "/usr/bin:/bin"}, {}, tmp_path / "trial")
        assert not [each for each in found if each.is_relative_to(tmp_path)]


@pytest.mark.parametrize("quote", ["", '"', "'"])
@pytest.mark.parametrize("option", ["file=", "--a-file=", "model.file="])
def test_file_in_the_value_of_an_option_is_shown(tmp_path: Path, option: str, quote: str) -> None:
    """Codex's values are TOML: `-c model_instructions_file="/path"`."""
    file = tmp_path / "it's.md"
    file.write_text("")
    words = ["env", f"{option}{quote}{file}{quote}"]
    assert file in readable(words, {"PATH": "/usr/bin"}, {}, Path("/nowhere"))
    half_quoted = ["env", f'{option}"{file}']
    assert file not in readable(half_quoted, {"PATH": "/usr/bin"}, {}, Path("/nowhere"))


def test_folders_that_contain_the_start_or_the_home_are_never_shown() -> None:
    words = [str(Path.cwd()), str(Path.home()), "/", sys.executable]
    found = readable(words, {"PATH": "/usr/bin"}, {}, Path("/nowhere"))
    assert Path(sys.prefix) in found
    assert not any(Path.cwd().is_relative_to(path) for path in found)
    assert not any(Path.home().is_relative_to(path) for path in found)


def test_what_a_setting_shows_is_there_and_begins_at_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is not there would be left out without a word, and a verifier that does not find
    its files could give 0 to every trial."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("data", "{root}/data", str(tmp_path / "data")):
        assert declared("show", [Path(name)]) == (tmp_path / "data",)
    missing = Path("{root}/other")
    with pytest.raises(ConfigurationError, match=rf"^verifier\.show: there is no {tmp_path}/other"):
        VerifierConfig(argv=("true",), show=(missing,)).build()
    with pytest.raises(ConfigurationError, match=r"^remote_agent\.show: there is no"):
        TrialConfig(show=(missing,)).wall([], [])


FORGED = "core.fsmonitor=echo forged > ../forged; false"


def _moved_to_the_top(work: Path) -> None:
    """The working directory is the repository itself."""
    for path in (work / ".git").iterdir():
        path.rename(work / path.name)
    (work / ".git").rmdir()
    subprocess.run(["git", "--git-dir=.", "config", "core.worktree", "."], cwd=work, check=True)


def _head_is_a_link_to_nowhere(work: Path) -> None:
    git = ["git", "-C", str(work)]
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    named = [*git, "symbolic-ref", "HEAD"]
    branch = subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()
    (work / ".git" / "HEAD").unlink()
    (work / ".git" / branch).unlink(missing_ok=True)
    (work / ".git" / "HEAD").symlink_to(branch)


def _parts_are_elsewhere(work: Path) -> None:
    (work / ".c").mkdir()
    for name in ("objects", "refs", "config"):
        (work / ".git" / name).rename(work / ".c" / name)
    (work / ".git" / "commondir").write_text("../.c")


@pytest.mark.parametrize(
    "change", [_moved_to_the_top, _head_is_a_link_to_nowhere, _parts_are_elsewhere]
)
def test_no_form_of_a_repository_keeps_settings_that_name_programs(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    git = ["git", "-C", str(work), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    subprocess.run([*git, "config", *FORGED.split("=", 1)], check=True)
    change(work)
    status = ["git", "status", "--short"]
    subprocess.run(status, cwd=work, capture_output=True, check=False)
    assert (tmp_path / "forged").exists(), "the trick works where nothing is cleaned"
    (tmp_path / "forged").unlink()
    copy_left(work, work, tmp_path / "kept", copy, tests=False)
    subprocess.run(status, cwd=copy, capture_output=True, check=False)
    assert not (tmp_path / "forged").exists()


def test_names_and_rights_that_an_agent_gives_cost_it_no_judgement(tmp_path: Path) -> None:
    work, copy = tmp_path / "work", tmp_path / "copy"
    (work / "No space left on device").mkdir(parents=True)
    (work / "conftest.py").symlink_to("a" * 300)
    for name in ("commondir", "config.worktree", "config", "hooks"):  # folders, where Git has files
        (work / ".git" / name).mkdir(parents=True)
    locked = work / "locked"
    locked.mkdir()
    (locked / "conftest.py").write_text("forged")
    locked.chmod(0o500)
    try:
        copy_left(work, work, tmp_path / "kept", copy, tests=False)
    finally:
        locked.chmod(0o700)
    assert sorted(path.name for path in copy.iterdir()) == [
        ".git",
        "No space left on device",
        "locked",
    ]
    assert not list((copy / "locked").iterdir())
    (copy / "locked" / "file").touch()
    (copy / "locked").chmod(0o500)
    remove_folder(copy)
    assert not copy.exists()


def test_nothing_is_written_through_a_link_that_took_the_place_of_a_folder(tmp_path: Path) -> None:
    work, kept, elsewhere = (tmp_path / name for name in ("work", "kept", "elsewhere"))
    (work / "tests").mkdir(parents=True)
    elsewhere.mkdir()
    (work / "tests" / "conftest.py").write_text("given")
    keep_configuration(work, kept)
    (work / "tests" / "conftest.py").unlink()
    (work / "tests").rmdir()
    (work / "tests").symlink_to(elsewhere)
    with patch.object(left_files, "SYSTEM", (*SYSTEM, str(elsewhere))):
        copy_left(work, work, kept, tmp_path / "copy", tests=False)
    assert (tmp_path / "copy" / "tests").is_symlink()
    assert not list(elsewhere.iterdir())
