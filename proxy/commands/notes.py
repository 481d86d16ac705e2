"""What a user says of a session from inside its agent: `agentic-proxy sessions rate this up`.

The agent reaches neither the store nor the admin key. So the command appends a line to a file of
`agentic-proxy run`, which keeps what the file says when the agent has ended:

    {"value": 1.0, "comment": "It found the cause."}
    {"tags": {"topic": "tests"}}

Only `run` reads such a file: an agent in training cannot rate itself. Invariant: whatever the agent
wrote there, reading it ends, and gives at most MAX_BYTES.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import orjson

from proxy.errors import ConfigurationError

THIS = "this"
"""The id that stands for the session of the agent in which the command runs."""
VARIABLE = "AGENTIC_PROXY_NOTES"
COMMAND = "AGENTIC_PROXY"
"""The variable with the path of `agentic-proxy`, for shells whose profile sets another PATH."""
FILE = "notes.jsonl"
MAX_BYTES = 64 * 2**10


def own_command() -> str:
    """The command of this installation."""
    beside = Path(sys.executable).with_name("agentic-proxy")
    return str(beside) if beside.exists() else "agentic-proxy"


def note(said: dict[str, Any]) -> None:
    """Appends a line.

    Raises:
        ConfigurationError: the command does not run in an agent that `agentic-proxy run` started.
    """
    if not (path := os.environ.get(VARIABLE)):
        raise ConfigurationError(
            f"{THIS}: names the session of the agent in which the command runs, but it runs in"
            " none that `agentic-proxy run` started; give an id, as `agentic-proxy sessions list`"
            " prints them"
        )
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(orjson.dumps(said) + b"\n")
    except OSError as error:
        raise ConfigurationError(f"{THIS}: cannot write {path}: {error.strerror}") from error


def noted(directory: Path) -> list[dict[str, Any]]:
    """The lines that are JSON objects, in order; of a file that is longer, the first ones."""
    try:
        fd = os.open(directory / FILE, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        lines = os.read(fd, MAX_BYTES).split(b"\n")
    finally:
        os.close(fd)
    found = []
    for line in lines:
        try:
            said = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(said, dict):
            found.append(said)
    return found
