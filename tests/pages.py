"""The pages that people read, as their code blocks, and what a test does with each.

A page is the README, CONTRIBUTING.md or a file of docs/. `tests/e2e/test_pages.py` follows its
fenced blocks in their order, as someone who types them:

| block | what happens |
|---|---|
| `bash` | runs, in the folder in which the one before it ended |
| `bash title="needs …"` | does not run: it needs what a test does not have, one of `NEEDS` |
| `python` | runs; blocks without another block between them are one program |
| any language with a title | is written to the file of that name |
| `text` | is the output of the block before it; `…` stands for any text |
| `yaml`, `toml` | is loaded by its model (`tests/test_docs.py`) |

A comment before a block changes this, or adds what the page does not show:

    <!-- test: bash                   hidden commands (also: python), up to the end of the comment
    cp agentic_trainer.yaml my.yaml
    -->
    <!-- test: server ready -->       the next block runs in the background, once it prints `ready`
    <!-- test: numbers vary -->       every number of the next block stands for any number
    <!-- test: excerpt of FILE -->    the next block's lines are lines of this file, in this order
    <!-- test: run by FILE -->        this test runs the commands of the next block
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {
    "a GPU",
    "a cluster",
    "Docker",
    "two machines",
    "the hub",
    "a package index",
    "an API key",
    "hours",
}
LANGUAGES = {"bash", "python", "yaml", "toml", "text", "mermaid", ""}
"""A block without a language is a drawing or a listing of files."""
DIRECTIVES = ("server ", "numbers vary", "excerpt of ", "run by ")
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$', re.M | re.S)
_COMMENT = re.compile(r"^<!-- test: (.*?) ?-->$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """Example: Block("README.md", "bash", "", "make setup\\n")"""

    page: str
    language: str
    title: str
    text: str
    directives: tuple[str, ...] = ()
    hidden: bool = False

    def directive(self, name: str) -> str | None:
        """What follows this word in a comment before the block; None: there is no such comment."""
        return next((d[len(name) :] for d in self.directives if d.startswith(name)), None)

    @property
    def needs(self) -> str | None:
        """What the block needs that a test does not have."""
        return self.title.removeprefix("needs ") if self.title.startswith("needs ") else None

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0][:40]}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page in order, hidden ones among them.

    Raises:
        ValueError: a fence or a comment is not one that `blocks_of` knows.
    """
    text, name = page.read_text(), name_of(page)
    fences, comments = list(_FENCE.finditer(text)), list(_COMMENT.finditer(text))
    if 2 * len(fences) != len(re.findall(r"^\s*```", text, re.M)):
        raise ValueError(f'{name}: a fence is not ```LANGUAGE or ```LANGUAGE title="…"')
    directives: list[str] = []
    for found in sorted([*fences, *comments], key=lambda match: match.start()):
        if found in comments:
            first, _, rest = found[1].partition("\n")
            if first in ("bash", "python"):
                yield Block(name, first, "", rest, tuple(directives), hidden=True)
                directives = []
            elif first.startswith(DIRECTIVES):
                directives.append(first)
            else:
                raise ValueError(f"{name}: unknown comment: {first}")
        else:
            yield Block(name, found[1], found[2] or "", found[3], tuple(directives))
            directives = []


def all_blocks(*languages: str) -> list[Block]:
    """The visible blocks of all pages in these languages."""
    shown = [block for page in PAGES for block in blocks_of(page) if not block.hidden]
    found = [block for block in shown if block.language in languages]
    assert found
    return found
