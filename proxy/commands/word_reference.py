"""Generates `docs/verdicts.md` and `docs/glossary.md` from `proxy/run_files/word_table.py`.

python -m proxy.commands.word_reference verdicts > docs/verdicts.md
python -m proxy.commands.word_reference glossary > docs/glossary.md
"""

from __future__ import annotations

import sys

from proxy.run_files.verdict import MEANINGS
from proxy.run_files.word_table import advice, glossary

VERDICTS = """# My run does not learn

`agentic-train status RUN` says how a run is doing, in one of eight words, with its cause and the
next commands. This page, made by `python -m proxy.commands.word_reference verdicts`, has what
stands behind each word; `agentic-train explain WORD` prints the same.
"""
GLOSSARY = """# Glossary

Made by `python -m proxy.commands.word_reference glossary`. [The ideas](ideas.md) shows the most
important ones in pictures; `agentic-train explain WORD` prints an entry.

| word | |
|---|---|
"""


def main() -> None:
    print({"verdicts": verdicts, "glossary": words}[sys.argv[1]](), end="")


def verdicts() -> str:
    """The page as Markdown."""
    parts = (
        f"\n## {word.capitalize()}\n\n*{MEANINGS[word].capitalize()}.*\n\n"
        f"**Decided from.** {each.decided}\n\n**What may be behind it.** {each.behind}\n\n"
        f"**Look at.** {each.look}\n\n**Then.** {each.do}\n"
        for word, each in advice().items()
    )
    return VERDICTS + "".join(parts)


def words() -> str:
    """The page as Markdown."""
    return GLOSSARY + "".join(f"| {word} | {text} |\n" for word, text in glossary().items())


if __name__ == "__main__":
    main()
