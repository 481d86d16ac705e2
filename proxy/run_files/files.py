"""Files that are replaced or appended to, and never seen half written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def replace_file(path: Path, text: str) -> None:
    """Writes the file atomically, even if the machine stops meanwhile."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # of a write it is not known otherwise
        raise


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete line; an incomplete last line, left by a killed process, is skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def drop_incomplete_line(path: Path) -> None:
    """Removes what a crash left of a line, so that the next line does not continue it."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def truncate_jsonl(path: Path, last_step: int) -> None:
    """Deletes the lines of steps after `last_step`, which a resumed run repeats."""
    kept = [line for line in read_jsonl(path) if line.get("step", 0) <= last_step]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
