"""Why trials failed, so that one cause has one name in every trial that it ended.

Invariant: the names hold no path, no id, and no number that differs from trial to trial. A folder
keeps its last name, and codes (exit code 2, status 404, errno 28) stay: they are what tells two
causes apart.
"""

from __future__ import annotations

import re

MAX_CHARS = 160
READ_CHARS = 1_000
"""Of an error, which may be as long as its writer liked."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SEE = re.compile(r"[;,]?\s*(?:see|the logs? (?:of the last one )?(?:is|are) in)\s+\S*/\S+")
"""Where to read more: the report of the failures says it better."""
_PATH = re.compile(r"(?<![\w.:/])(?:~|\.{1,2})?/(?:[^\s/'\"()\[\]:;,]+/)*([^\s/'\"()\[\]:;,]+)/?")
_PORT = re.compile(r"(?<=[\w\]]):\d{2,5}\b")
_UUID = re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", re.IGNORECASE)
_ID = re.compile(r"(?<![\w])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]*[A-Za-z0-9]{8,}(?![\w])")
"""A word of letters and digits with a part of eight or more, such as `train-17-AbPKSthLiicd`."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE)
_CODE = re.compile(r"\b(code|status|signal|errno|HTTP)([ =]+)(-?\d{1,4})\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![\w\x00])\d[\d.,_]*\d|(?<![\w\x00])\d")

_INFRASTRUCTURE = re.compile(
    r"ProxyClientError|StoreError|EngineError|WeightSyncError|UnreachableEngine|LaunchError"
    r"|\bengines?\b.{0,40}\b(?:ended|died|keeps? ending|did not|does not|cannot|no answer)"
    r"|no replica|the proxy (?:ended|did not|cannot|does not)|cannot be reached"
    r"|No space left|disk (?:is )?full|Too many open files|Cannot allocate memory|out of memory"
    r"|Connection (?:refused|reset)|Name or service not known|Resource temporarily unavailable"
    r"|the sandbox|harbor",
    re.IGNORECASE,
)


def cause_of(error: str | None) -> str:
    """The cause in the error of a trial: its first line without what only this trial has.

    Example: cause_of("exit code 2; see /runs/a/trials/sum-17-AbPKSthLiicd/agent.log")
        == "exit code 2"
    """
    lines = _ESCAPES.sub("", (error or "")[:READ_CHARS]).strip().splitlines()
    text = _SEE.sub("", lines[0]) if lines else ""
    text = _PATH.sub(r"…/\1", text)
    text = _UUID.sub("#", text)
    text = _ID.sub("#", text)
    text = _ADDRESS.sub("#", text)
    text = _PORT.sub("", text)
    text = _CODE.sub("\\1\\2\x00\\3", text)  # the mark keeps the number
    text = re.sub(r"\[Errno (\d+)\]", "[Errno \x00\\1]", text)
    text = _NUMBER.sub("#", text).replace("\x00", "")
    return " ".join(text.split())[:MAX_CHARS].strip(" ;,") or "no error was recorded"


def is_infrastructure(error: str) -> bool:
    """Whether the error is of what trials run on (engine, proxy, disk, network), and not of the
    agent, the tasks or the verifier."""
    return _INFRASTRUCTURE.search(error) is not None
