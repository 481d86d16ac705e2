"""The tasks: small changes to a folder of text files, a command for each, and its outcome.

This module imports only the standard library, because the verifier, a separate program, uses it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

WORKSPACE = Path(__file__).with_name("workspace")
SOURCES = ("apple", "bread", "cherry", "dates", "grape", "honey", "lemon", "melon")
"""Files of the folder, with one number per line."""
TARGETS = ("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver")
"""Files that do not exist yet."""

REQUESTS: Mapping[str, str] = {
    "count": "Count the lines of {source}.txt, and write the number into {target}.txt",
    "sum": "Add up the numbers of {source}.txt, and write the sum into {target}.txt",
    "first": "Write the first line of {source}.txt into {target}.txt",
    "sort": "Write the numbers of {source}.txt in rising order into {target}.txt",
    "rename": "Rename {source}.txt to {target}.txt",
}
PROGRAMS: Mapping[str, str] = {
    "count": "wc -l < {source}.txt",
    "sum": "awk '{{s+=$1}} END {{print s}}' {source}.txt",
    "first": "head -n 1 {source}.txt",
    "sort": "sort -n {source}.txt",
}


def new_task(rng: random.Random) -> dict[str, str]:
    """A task's data: its `kind`, its files and the `prompt`."""
    kind = rng.choice(list(REQUESTS))
    source, target = rng.choice(SOURCES), rng.choice(TARGETS)
    prompt = REQUESTS[kind].format(source=source, target=target)
    return {"prompt": prompt, "kind": kind, "source": source, "target": target}


def command(kind: str, source: str, target: str) -> str:
    """A command that does the task."""
    if kind == "rename":
        return f"mv {source}.txt {target}.txt"
    return f"{PROGRAMS[kind].format(source=source)} > {target}.txt"


def expected(kind: str, source: str) -> list[str]:
    """The words that the target must contain."""
    original = (WORKSPACE / f"{source}.txt").read_text(encoding="utf-8").split()
    return {
        "count": [str(len(original))],
        "sum": [str(sum(map(int, original)))],
        "first": original[:1],
        "sort": sorted(original, key=int),
        "rename": original,
    }[kind]


def is_done(folder: Path, kind: str, source: str, target: str) -> bool:
    """Whether `folder`, which began as a copy of `WORKSPACE`, has the outcome of the task."""
    written = folder / f"{target}.txt"
    is_gone = not (folder / f"{source}.txt").exists()
    return (
        written.is_file()
        and written.read_text(encoding="utf-8").split() == expected(kind, source)
        and is_gone == (kind == "rename")
    )
