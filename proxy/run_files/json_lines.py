"""Reads a growing file of JSON lines piece by piece, from either end.

Invariant: a request reads `PIECE_BYTES`, or one line if that is longer. A last line without its
end, which is being written, is not read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from proxy.http.valid_json import read_json

PIECE_BYTES = 2 * 2**20
"""About 7,000 lines of trials; half of a tenth of a second of work."""
SEARCHED_BYTES = 64 * 2**20
"""About 200,000 lines of trials; a third of a second of work."""

Line = dict[str, Any]


def lines_after(path: Path, start: int) -> tuple[list[Line], int]:
    """The lines from the byte `start` on, and where the next ones begin."""
    found, at = [], start
    if not path.is_file():
        return [], 0
    with path.open("rb") as file:
        file.seek(start)
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            found.append(_parse(raw))
            at += len(raw)
            if at - start >= PIECE_BYTES:
                break
    return found, at


def every_line(path: Path) -> Iterator[Line]:
    """All lines, of which one piece of the file is in memory at a time."""
    at, lines = 0, [Line()]
    while lines:
        lines, at = lines_after(path, at)
        yield from lines


def lines_before(
    path: Path, end: int | None, wanted: Callable[[Line], bool], limit: int
) -> tuple[list[tuple[int, Line]], int | None]:
    """At most `limit` wanted lines before the byte `end` (None: the end of the file), the last one
    first, each with the byte at which it begins; and where to go on, None at the beginning of the
    file."""
    if not path.is_file():
        return [], None
    found: list[tuple[int, Line]] = []
    with path.open("rb") as file:
        size = _size(file)
        end = _line_start(file, size if end is None else min(end, size))
        for at, raw in _backwards(file, end):
            end = at
            if wanted(line := _parse(raw)):
                found.append((at, line))
                if len(found) == limit:
                    break
    return found, end or None


def lines_of_step(
    path: Path, step: int, limit: int, matches: Callable[[Line], bool] = lambda _: True
) -> tuple[list[Line], bool]:
    """At most `limit` lines with this `step` that match, of a file whose steps do not decrease,
    and whether there are more."""
    if not path.is_file():
        return [], False
    found: list[Line] = []
    with path.open("rb") as file:
        file.seek(_first_of(file, step))
        for raw in file:
            line = _parse(raw) if raw.endswith(b"\n") else {}
            if line.get("step") != step:
                break
            if matches(line):
                if len(found) == limit:
                    return found, True
                found.append(line)
    return found, False


def last_line_with(path: Path, name: str, value: str) -> Line | None:
    """The last line whose field `name` is `value`, in the file's last SEARCHED_BYTES."""
    if not path.is_file():
        return None
    quoted = json.dumps(value).encode()
    with path.open("rb") as file:
        size = _size(file)
        end, least = _line_start(file, size), size - SEARCHED_BYTES
        while end > max(0, least):
            for at, raw in _backwards(file, end):
                end = at
                if quoted in raw and (line := _parse(raw)).get(name) == value:
                    return line
    return None


def _first_of(file: BinaryIO, step: int) -> int:
    """Where the first line of a step begins, by bisection."""
    low, high = 0, _size(file)
    while low < high:
        middle = (low + high) // 2
        start = _line_start(file, middle)
        file.seek(start)
        raw = file.readline()
        if not raw.endswith(b"\n") or _step(_parse(raw)) >= step:
            high = start
        else:
            low = start + len(raw)
    return low


def _step(line: Line) -> float:
    step = line.get("step")
    return step if isinstance(step, int | float) else 0


def _line_start(file: BinaryIO, at: int) -> int:
    """Where the line that contains the byte `at` begins."""
    size = 512
    while True:
        start = max(0, at - size)
        file.seek(start)
        newline = file.read(at - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        if start == 0:
            return 0
        size *= 4


def _backwards(file: BinaryIO, end: int) -> Iterator[tuple[int, bytes]]:
    """`(where it begins, line)` of the lines before the byte `end`, the last one first, of one
    piece of the file."""
    size, start, raw = PIECE_BYTES, end, b""
    while start > 0:
        start = max(0, end - size)
        file.seek(start)
        raw = file.read(end - start)
        if start == 0 or raw.count(b"\n") > 1:
            break
        size *= 2  # a line that is longer than a piece
    lines, at = raw.split(b"\n")[:-1], end
    for line in reversed(lines[start > 0 :]):  # the first one may have begun before the piece
        at -= len(line) + 1
        yield at, line


def _parse(raw: bytes) -> Line:
    """The line's object; `{}` for anything else, which a foreign program may have written."""
    line = read_json(raw)
    return line if isinstance(line, dict) else {}


def _size(file: BinaryIO) -> int:
    return file.seek(0, 2)
