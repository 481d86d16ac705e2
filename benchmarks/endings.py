"""Why a program ended that a benchmark started: one line for the row of a table."""

from __future__ import annotations

import re
import signal

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|MemoryError|Cannot allocate memory|can't allocate memory",
)
LINE_CHARS = 200


def reason(code: int, output: str) -> str:
    """What the exit status (negative, or 128 + N, for signal N) and the last lines say.

    Example: reason(1, "…\\nValueError: no GPU") == "exit status 1: ValueError: no GPU"
    """
    lines = [line.strip() for line in output.splitlines()]
    lines = [line for line in lines if line and not line.startswith("|")]
    memory = next((line for line in reversed(lines) if _OUT_OF_MEMORY.search(line)), None)
    if memory is not None:
        return f"out of memory: {_cell(memory)}"
    number = -code if code < 0 else code - 128
    if number in {each.value for each in signal.Signals}:
        name = signal.Signals(number).name
        often = ", as if the machine's memory ran out" if name == "SIGKILL" else ""
        return f"ended by {name}{often}"
    return f"exit status {code}: {_cell(lines[-1]) if lines else 'it printed nothing'}"


def _cell(line: str) -> str:
    return line.replace("|", "/")[:LINE_CHARS]
