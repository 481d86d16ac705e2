"""Every code block of every page runs, or names what it needs (tests/pages.py).

Pages on training run short here (`SHORT`), except for those of `WHOLE`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.install import installs as known_installs
from proxy.machine.port import free_port
from tests.e2e.reader import Reader, prints
from tests.pages import LANGUAGES, NEEDS, PAGES, ROOT, Block, blocks_of, name_of

MODEL = str(ROOT / "examples/quickstart/model")
SHORT = {
    "AGENTIC_TRAIN__TRAINER__STEPS": "2",
    "AGENTIC_TRAIN__EVAL__LIMIT": "8",
}
PATIENT = {"AGENTIC_TRAIN__PROXY_SERVER__START_TIMEOUT_S": "600"}
"""For a machine on which much else runs."""
WHOLE = {"docs/tutorials/train.md", "docs/tutorials/own_agent.md"}
LONG = {
    "README.md",
    "docs/adapters.md",
    "docs/check_us.md",
    "docs/data.md",
    "docs/evaluate.md",
    "docs/harbor.md",
    "docs/index.md",
    "docs/low_level.md",
    "docs/notes/images.md",
    "docs/own-parts.md",
    "docs/proxy.md",
    "docs/python-api.md",
    "docs/sft.md",
    "docs/swarm.md",
    "docs/tutorials/ray.md",
    *WHOLE,
}
"""Pages whose commands start a vLLM several times, or run long tests."""
REPOSITORY = [path for path in sorted(ROOT.iterdir()) if path.name not in (".git", "runs")]


def pages() -> list[object]:
    names = [name_of(page) for page in PAGES]
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in names]


@pytest.mark.parametrize("name", pages())
def test_blocks_of_a_page_work_and_print_what_the_page_says(name: str, tmp_path: Path) -> None:
    blocks = list(blocks_of(ROOT / name))
    for target in sorted(made_by(blocks)):
        assert not installs(target), f"the page runs `make {target}`, which installs: run it before"
    for install in sorted(words_after("python -m benchmarks.install", blocks)):
        assert known_installs()[install].is_ready(), f"run python -m benchmarks.install {install}"
    reader = reader_of(name, tmp_path)
    try:
        reader.read(blocks)
    finally:
        reader.close()


def made_by(blocks: list[Block]) -> set[str]:
    """The targets of `make` that the blocks run."""
    return words_after("make", blocks)


def words_after(command: str, blocks: list[Block]) -> set[str]:
    """The first words behind this command in the blocks that run."""
    shells = [block for block in blocks if block.language == "bash" and not block.needs]
    pattern = re.compile(rf"^{re.escape(command)} ([a-z-]+)", re.M)
    return {found for block in shells for found in pattern.findall(block.text)}


def installs(target: str) -> bool:
    """Whether `make TARGET` would install something first, which a test must not do."""
    plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    return " install " in plan.stdout


def reader_of(name: str, tmp_path: Path) -> Reader:
    """Someone in a checkout of the repository; for a tutorial, in an empty folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    if "tutorials" not in name:
        for path in REPOSITORY:
            (folder / path.name).symlink_to(path)
    port = free_port("127.0.0.1")
    environment = {
        **os.environ,
        **({} if name in WHOLE else SHORT),
        **PATIENT,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "READER": str(tmp_path / "place"),
        "AGENTIC_PROXY_PORT": str(port),
    }
    placeholders = {
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "/path/to/checkpoint": MODEL,
        "/models/qwen3": MODEL,
        "~/.local/state": os.environ["XDG_STATE_HOME"],
        "$HOME/.local/state": os.environ["XDG_STATE_HOME"],
    }
    return Reader(folder, environment, placeholders)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_run_or_says_what_it_needs(page: Path) -> None:
    assert [why for block in blocks_of(page) if (why := why_not_run(block))] == []


def why_not_run(block: Block) -> str | None:
    """Why a block neither runs nor says what it needs; None: it does."""
    if block.language not in LANGUAGES:
        return f"{block}: nothing runs a block in {block.language}"
    if block.needs is not None and block.needs not in NEEDS:
        return f"{block}: needs {block.needs}, which is not one of {NEEDS}"
    if (test := block.directive("run by ")) is not None:
        text = (ROOT / test).read_text()
        programs = {words[0] for line in block.text.splitlines() if (words := line.split())}
        if missing := sorted(program for program in programs if program not in text):
            return f"{block}: {test} does not run {missing}"
    if (file := block.directive("excerpt of ")) is not None:
        lines = iter([line.strip() for line in (ROOT / file).read_text().splitlines()])
        if not all(line.strip() in lines for line in block.text.splitlines()):
            return f"{block}: not lines of {file}"
    return None


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Block("p", "ruby", "", "puts 1"), "nothing runs a block in ruby"),
        (Block("p", "bash", "needs luck", "true"), "needs luck"),
        (Block("p", "bash", "", "cargo run", ("run by tests/test_wheel.py",)), "cargo"),
        (Block("p", "python", "", "x = 1", ("excerpt of trainer/fit.py",)), "not lines of"),
    ],
)
def test_block_that_nothing_runs_is_refused(block: Block, why: str) -> None:
    assert why in (why_not_run(block) or "")


@pytest.mark.parametrize(
    ("printed", "page", "same"),
    [
        ("a 1\nb\n", "a …\nb", True),
        ("a 1\nb\nc\n", "a …\nb", False),
        ("x\ny\nlast\n", "…\nlast", True),
        ("x", "y", False),
    ],
)
def test_ellipsis_stands_for_any_text(printed: str, page: str, same: bool) -> None:
    assert prints(printed, page) is same


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("took 1:02, 5.6e-07 off", True),
        ("took  1:02, 15 off", True),  # in a column of another width
        ("took long, 5.6e-07 off", False),
    ],
)
def test_numbers_that_vary_stand_for_any_number(printed: str, same: bool) -> None:
    assert prints(printed, "took 0:42, 1 off", numbers=False) is same
    assert not prints(printed, "took 0:42, 1 off")
