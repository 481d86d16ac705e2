"""What the words of this project mean, and what is behind each verdict, from `glossary.yaml` and
`verdicts.yaml` beside this file. `docs/glossary.md`, `docs/verdicts.md` and `agentic-train explain`
have them from here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from proxy.run_files import verdict
from proxy.run_files.formats import percent
from proxy.run_files.verdict import Word

_SHARES = ("FAILING_SHARE", "UNIFORM_SHARE", "FALL")
_NUMBERS = ("WINDOW_STEPS", "ENOUGH_STEPS", "LEAST_STEPS")


class Advice(NamedTuple):
    """Example: advice()[Word.TOO_HARD].do"""

    decided: str
    """From what the verdict is decided."""
    behind: str
    """What may have caused it."""
    look: str
    """Where to look first."""
    do: str


@functools.cache
def glossary() -> Mapping[str, str]:
    """Word → what it means, in alphabetical order."""
    entries: dict[str, str] = yaml.safe_load(_text("glossary.yaml"))
    return dict(sorted(entries.items(), key=lambda entry: entry[0].lower()))


@functools.cache
def advice() -> Mapping[Word, Advice]:
    """For each verdict; shares and numbers of steps are those of `verdict.py`."""
    shares = {name: percent(getattr(verdict, name)) for name in _SHARES}
    numbers = {name: getattr(verdict, name) for name in _NUMBERS}
    entries: dict[str, dict[str, str]] = yaml.safe_load(_text("verdicts.yaml"))
    return {
        word: Advice(
            **entries[word] | {"decided": entries[word]["decided"].format(**shares, **numbers)}
        )
        for word in Word
    }


def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
