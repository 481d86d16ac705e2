"""The tasks: small changes to a folder of text files, the command that does each, and its outcome.

It imports only the standard library: the verifier is a program of its own and uses it too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

WORKSPACE = Path(__file__).with_name("workspace")
SOURCES = ("apple", "bread", "cherry", "dates", "grape", "honey", "lemon", "melon")
"""Files of the folder, a number in each line."""
TARGETS = ("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver")
"""Files that are not there yet."""

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
    """The words that the target must hold."""
    original = (WORKSPACE / f"{source}.txt").read_text().split()
    return {
        "count": [str(len(original))],
        "sum": [str(sum(map(int, original)))],
        "first": original[:1],
        "sort": sorted(original, key=int),
        "rename": original,
    }[kind]


def is_done(folder: Path, kind: str, source: str, target: str) -> bool:
    """Whether `folder`, a copy of `WORKSPACE` at first, is as the task wants it."""
    written = folder / f"{target}.txt"
    is_gone = not (folder / f"{source}.txt").exists()
    return (
        written.is_file()
        and written.read_text().split() == expected(kind, source)
        and is_gone == (kind == "rename")
    )
