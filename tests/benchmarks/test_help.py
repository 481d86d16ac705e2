"""Each benchmark is a program that says by `--help` how it is called."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.install import Install, main

ROOT = Path(__file__).parents[2]
FILES = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]
PROGRAMS = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for file in FILES
    if 'if __name__ == "__main__":' in file.read_text("utf-8") or file.stem == "__main__"
)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_there_are_programs() -> None:
    assert {"benchmarks.proxy", "benchmarks.scale", "benchmarks.install"} <= set(PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_names_the_command(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert not ended.value.code
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m {program} ")
    (module,) = [f for f in FILES if _name(f) == program]
    doc = ast.get_docstring(ast.parse(module.read_text("utf-8")))
    assert doc is not None
    assert " ".join(doc.split()[:3]) in " ".join(text.split())


def _name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def test_installed_once_until_commands_or_inputs_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.install.ROOT", tmp_path)
    pins, runs = tmp_path / "pins", tmp_path / "runs"
    pins.write_text("a==1")
    command = [sys.executable, "-c", "open('runs', 'a').write('x')"]
    monkeypatch.setattr(
        "benchmarks.install.installs",
        lambda _=None: {"it": Install("a thing", Path("it"), [command], ["pins"])},
    )
    assert (main(["it"]), main(["it"])) == (0, 0)
    assert runs.read_text() == "x"
    pins.write_text("a==2")
    main(["it"])
    assert runs.read_text() == "xx"


def test_failed_install_says_which_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.install.ROOT", tmp_path)
    broken = Install("a thing", Path("it"), [["no-such-program"]])
    monkeypatch.setattr("benchmarks.install.installs", lambda _=None: {"it": broken})
    with pytest.raises(SystemExit, match="1"):
        main(["it"])
    assert "it: " in capsys.readouterr().err
    assert not broken.is_ready()
