"""A home folder that cannot be written, which is what a read-only one is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engines.vllm_server import VllmConfig, server_environment
from proxy.machine.compiled_files import PLACES, compile_elsewhere

TRAIN = """
import os
import trainer.cli, proxy.cli
from proxy.machine.compiled_files import PLACES
for main in (trainer.cli.main, proxy.cli.main):
    for name in PLACES:
        os.environ.pop(name, None)
    try:
        main(["--version"])
    except SystemExit:
        print(*(os.environ.get(name) for name in PLACES))
"""


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = (*PLACES, *(other for _, other in PLACES.values() if other))
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    yield
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even root can write there."""
    monkeypatch.setenv("HOME", "/proc/self/no-home")


def set_here() -> dict[str, str]:
    return {name: os.environ[name] for name in PLACES if name in os.environ}


@pytest.mark.usefixtures("no_home")
def test_engines_compile_in_a_folder_of_the_user_alone(tmp_path: Path) -> None:
    compile_elsewhere()
    folder = tmp_path / f"agentic-compiled-{os.getuid()}"
    expected = {
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set_here() == expected
    assert expected.items() <= server_environment(VllmConfig()).items()
    again = {name: os.environ.pop(name) for name in PLACES}
    compile_elsewhere()
    assert set_here() == again


@pytest.mark.usefixtures("no_home")
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"XDG_CACHE_HOME": "/cache", "TRITON_HOME": "/t", "FLASHINFER_WORKSPACE_BASE": "/f"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    compile_elsewhere()
    assert set_here() == {"FLASHINFER_WORKSPACE_BASE": "/f"}


def test_home_folder_that_can_be_written_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    compile_elsewhere()
    assert set_here() == {}


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("mode", [0o777, 0o750])
def test_folder_that_others_can_write_to_or_read_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / f"agentic-compiled-{os.getuid()}"
    folder.mkdir()
    folder.chmod(mode)
    compile_elsewhere()
    used = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
    assert used != folder
    assert used.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("no_home")
def test_both_programs_see_to_it(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN], env=env, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("/")]
    folder = f"{tmp_path}/agentic-compiled-{os.getuid()}"
    assert lines == [f"{folder}/vllm {folder}/triton {folder}"] * 2
