"""Counts the words of the pages that a user reads: `python -m tests.docs_words`.

A user's page is the README or a page of docs/ outside docs/notes/ (measurements, and notes for the
people who change the code), docs/api/ (generated from docstrings) and the generated references.
Everything that the page shows counts, code and tables too; hidden comments, pictures, and tables
that a program writes between marks (`<!-- trained -->` … `<!-- end -->`) do not. Exits with 1 if a
limit is exceeded.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.pages import PAGES, name_of

MOST_WORDS = 30_000
MOST_WORDS_OF_A_PAGE = 1_500
GENERATED = {
    f"docs/{name}.md"
    for name in (
        *(
            "configuration",
            "fields",
            "glossary",
            "gpus",
            "learn_keys",
            "metrics",
            "routes",
            "secrets",
            "verdicts",
        ),
    )
}
NOT_A_USERS = ("docs/notes/", "docs/api/", "CONTRIBUTING.md")
_GENERATED = re.compile(
    r"<!-- (?:trained|refused) -->.*?<!-- end -->|<!-- (\w+): begin -->.*?<!-- \1: end -->", re.S
)
_HIDDEN = re.compile(r"<!--.*?-->|<svg.*?</svg>|<style.*?</style>", re.S)
_ADDRESS = re.compile(r"(\[[^\]]*\])\([^)]*\)")


def users_pages() -> list[Path]:
    names = {page: name_of(page) for page in PAGES}
    return [
        page
        for page, name in names.items()
        if name not in GENERATED and not name.startswith(NOT_A_USERS)
    ]


def words_of(text: str) -> int:
    """The number of words that a reader sees.

    Example: words_of("| [two words](a.md#b) | <!-- not shown --> |") == 2
    """
    shown = _ADDRESS.sub(r"\1", _HIDDEN.sub("", _GENERATED.sub("", text)))
    return sum(any(c.isalnum() for c in word) for word in shown.split())


def main() -> int:
    counts = {name_of(page): words_of(page.read_text("utf-8")) for page in users_pages()}
    for name, count in sorted(counts.items(), key=lambda item: -item[1]):
        mark = f"  over {MOST_WORDS_OF_A_PAGE:,}" if count > MOST_WORDS_OF_A_PAGE else ""
        print(f"{count:7,}  {name}{mark}")
    print(f"{sum(counts.values()):7,}  in all; at most {MOST_WORDS:,}")
    return int(sum(counts.values()) > MOST_WORDS or max(counts.values()) > MOST_WORDS_OF_A_PAGE)


if __name__ == "__main__":
    sys.exit(main())
