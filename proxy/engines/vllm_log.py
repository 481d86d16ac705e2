"""Why a vLLM server ended, from its log.

Several processes write into one log: the API server, the engine's core, workers. The one that fails
first names the cause; those that wait for it fail after it and name only that. So the cause is

1. the first traceback that ended a process, those that only report another process aside
2. a crash without a traceback (a segmentation fault, C++'s terminate), or what argparse refuses
3. that another process was killed, which is all that the others know of it
4. the last line

Lines of level WARNING and below are never a cause, whatever they quote, nor are tracebacks that
ended no process: of one request, of a destructor, of logging itself.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FATAL = ("", "ERROR", "CRITICAL")
"""Levels of lines that may be a cause; empty: the line is not a logger's."""
SILENT = "one of its processes ended without an error, as if killed (is the memory full?)"
"""Where the others report only that, each in its own words."""
MESSAGE_CHARS = 600
MESSAGE_LINES = 6
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\s*((?:\([^()]*\bpid=\d+[^()]*\)\s?)+)")
_LEVEL = re.compile(
    r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?|: +)"
)
"""Of vLLM's own lines, and of uvicorn's."""
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")
_IN_GROUP = re.compile(r"^ *(?:[|+] ?)+(?:-+ ?(\d+ -+)?)?")
"""What stands before each line of the traceback of an exception group."""
_ERROR = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]*)", line (?P<line>\d+)')
_CHAINED = (
    "The above exception was the direct cause",
    "During handling of the above exception",
)
_NOT_FATAL = re.compile(
    r"Exception in ASGI application|Exception ignored in|Task exception was never retrieved|"
    r"Exception in callback|--- Logging error ---|Failed to load plugin|Unhandled exception in"
)
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|EngineDeadError|Engine process failed to start|"
    r"EngineCore encountered an issue|WorkerProc initialization failed|root cause|"
    r"BrokenPipeError|EOFError|ConnectionResetError|CancelledError|KeyboardInterrupt|"
    r"Executor failed|cancelled|died unexpectedly|ChildFailedError|\(\d+ sub-exceptions?\)"
)
_CRASH = re.compile(
    r"^Fatal Python error: .*|^terminate called .*|^\s*what\(\): .*|.*!!! Segfault encountered.*"
    r"|^[\w.-]+: error: .*|^double free or corruption.*|^free\(\): .*|^munmap_chunk.*"
    r"|.*error while loading shared libraries: .*|^Failed: Cuda error.*"
)
_EXIT_CODES = re.compile(r"Failed core proc\(s\): \{(?P<codes>[^}]*)\}")
_KILLED = re.compile(
    r"'(?P<name>[\w-]+)': -(?P<number>\d+)|(?P<dead>[\w -]*\bproc\w*\b.*died unexpectedly.*)"
)


@dataclass(frozen=True, slots=True)
class _Line:
    process: str
    level: str
    """Empty: not a line of a logger."""
    text: str


@dataclass(slots=True)
class _Traceback:
    level: str
    heading: str
    """The line before it of the same process."""
    errors: list[str] = field(default_factory=list)
    """One, or those of a chain in the order in which they were raised."""

    @property
    def fatal(self) -> bool:
        return self.level in FATAL and not _NOT_FATAL.search(self.heading)

    @property
    def text(self) -> str:
        """The error that was raised last, with the first of its chain if it does not quote it."""
        first, last = self.errors[0], self.errors[-1]
        kind, _, message = first.partition(": ")
        known = (message or kind).split("\n")[0][:60]
        return last if first == last or known in last else f"{last} (caused by {first})"


def cause_of_end(log: str) -> str:
    """One line: the error that most likely ended the server which has written this log."""
    lines = [_parsed(line) for line in log.splitlines()]
    found = [each for each in _tracebacks(lines) if each.errors and each.fatal]
    causes = [each.text for each in found if not _CONSEQUENCE.search(each.text)]
    killed = filter(None, (_killed(each.text) for each in lines))
    consequences = [f"{SILENT}: {each.text}" for each in found]
    written = [each for each in lines if each.text.strip()]
    last = [each.text for each in written if each.level in FATAL] or [each.text for each in written]
    candidates = (*causes, *_crashes(lines), *killed, *consequences[:1], *last[-1:])
    return _one_line(next(iter(candidates), "its log is empty"))


def _crashes(lines: Sequence[_Line]) -> Iterator[str]:
    """Crashes without a traceback; C++ writes the message on a second line."""
    matched = (each.level in FATAL and _CRASH.match(each.text) is not None for each in lines)
    for crashed, group in itertools.groupby(zip(matched, lines, strict=True), lambda pair: pair[0]):
        if crashed:
            yield "\n".join(line.text for _, line in group)


def _parsed(line: str) -> _Line:
    line = _COLOUR.sub("", line)
    process = ""
    if (named := _PROCESS.match(line)) is not None:
        process, line = named[1].strip(), line[named.end() :]
    line = _IN_GROUP.sub("", line)
    level = _LEVEL.match(line)
    if level is None:
        return _Line(process, "", line)
    return _Line(process, level[1], line[level.end() :])


def _tracebacks(lines: Sequence[_Line]) -> list[_Traceback]:
    """Those of all processes, whose lines may be mixed, in the order in which they began."""
    by_process: dict[str, list[tuple[int, _Line]]] = {}
    for number, line in enumerate(lines):
        by_process.setdefault(line.process, []).append((number, line))
    found = [each for own in by_process.values() for each in _of_one_process(own)]
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def _of_one_process(lines: Sequence[tuple[int, _Line]]) -> Iterator[tuple[int, _Traceback]]:
    at, heading, chained = 0, "", None
    while at < len(lines):
        number, line = lines[at]
        if not _TRACEBACK.search(line.text):
            if line.text.strip():
                heading = line.text
                if not line.text.startswith(_CHAINED):
                    chained = None
            at += 1
            continue
        continues = heading.startswith(_CHAINED) and chained is not None
        block = chained if continues and chained is not None else _Traceback(line.level, heading)
        error, at = _error_after(lines, at + 1, line.level)
        if error:
            block.errors.append(error)
        if not continues:
            yield number, block
        chained, heading = block, ""


def _error_after(lines: Sequence[tuple[int, _Line]], at: int, level: str) -> tuple[str, int]:
    """The error of a traceback, whose frames begin at `at`, and where its lines end."""
    frame, source = "", ""
    while at < len(lines):
        line = lines[at][1]
        if (place := _FRAME.match(line.text)) is not None:
            frame, source = f"{place['file'].rpartition('/')[2]}:{place['line']}", ""
        elif frame and not source and line.text.startswith("    "):
            source = line.text.strip()
        elif line.level == level and (error := _ERROR.match(line.text)) is not None:
            message, at = _message(lines, at + 1, level, error["message"] or "")
            if message:
                return f"{error['kind']}: {message}", at
            return f"{error['kind']} at {frame}: {source}", at
        elif line.level == level and _TRACEBACK.search(line.text):
            break
        at += 1  # also over other lines that another thread has written between
    return "", at


def _message(
    lines: Sequence[tuple[int, _Line]], at: int, level: str, first: str
) -> tuple[str, int]:
    """A message of several lines ends with an empty one, or where something else begins."""
    parts = [first]
    while at < len(lines) and len(parts) < MESSAGE_LINES:
        line = lines[at][1]
        begins = _TRACEBACK.search(line.text) or line.text.startswith(("[rank", "*** ", "INFO:"))
        if line.level != level or not line.text.strip() or begins:
            break
        parts.append(line.text.strip())
        at += 1
    return "\n".join(filter(None, parts)), at


def _killed(text: str) -> str:
    if (codes := _EXIT_CODES.search(text)) is not None:
        text = codes["codes"]
    if (found := _KILLED.search(text)) is None:
        return ""
    if found["dead"]:
        return found["dead"].strip()
    try:
        name = signal.Signals(int(found["number"])).name
    except ValueError:
        name = f"signal {found['number']}"
    likely = ", probably because the machine's memory was full" if name == "SIGKILL" else ""
    return f"its process {found['name']} was ended by {name}{likely}"


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
