"""The pages of docs/tutorials: files are written and commands run, in the order of the page.

A block with a title is written to a file of that name. `bash` blocks run one after the other, each
in the folder in which the one before it ended. A `text` block is the output of the block before it,
where `…` stands for any text. A `bash` block whose title says what it needs ("needs a GPU") does
not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs/tutorials"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```', re.M | re.S)
LONG = {"train", "own_agent"}
TIMEOUT_S = 1200


@dataclass
class Reader:
    """Someone who types what a page says."""

    folder: Path
    printed: str = ""

    def type(self, commands: str) -> None:
        script = f"trap 'pwd > \"$READER\"' EXIT\n{commands}"
        place = Path(os.environ["READER"])
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )
        self.printed = done.stdout
        assert done.returncode == 0, f"{commands}\n{self.printed}"
        self.folder = Path(place.read_text().strip())

    def follow(self, language: str, title: str, text: str) -> None:
        if language == "text":
            assert prints(self.printed, text), f"printed:\n{self.printed}\nthe page says:\n{text}"
        elif language == "bash" and not title.startswith("needs "):
            self.type(text)
        elif title and language != "bash":
            (self.folder / title).write_text(text)


def prints(printed: str, page: str) -> bool:
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    pattern = ".*?".join(re.escape(part) for part in page.strip().split("…"))
    return re.fullmatch(pattern, lines, re.S) is not None


def pages() -> list[object]:
    names = sorted(page.stem for page in PAGES.glob("*.md"))
    return [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in names]


@pytest.mark.parametrize("name", pages())
def test_commands_of_a_tutorial_work_and_print_what_the_page_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("READER", str(tmp_path / "place"))
    (tmp_path / "here").mkdir()
    reader = Reader(tmp_path / "here")
    for language, title, text in BLOCK.findall((PAGES / f"{name}.md").read_text()):
        reader.follow(language, title, text)


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
