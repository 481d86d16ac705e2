"""The server of processes whose body is a Python function (`python -m … FD KIND MODULE:FUNCTION`).

Imports the function's module once; each call then runs in a fork of its own, under a supervisor
(`supervisor.py`), and can be killed. Invariant: nothing that one call does is seen by another.
Random generators are seeded anew in each, or all calls would draw the same numbers.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_loop.launchers.calls import AgentCall, GradeCall
from agent_loop.launchers.supervisor import Body, Job, serve

KINDS: dict[str, Callable[..., Any]] = {"agent": AgentCall, "grade": GradeCall}


def main() -> None:
    fd, kind, target = sys.argv[1:]
    serve(socket.socket(fileno=int(fd)), _body(kind, target))


def _body(kind: str, target: str) -> Body:
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 (the user's module may raise anything)
        reason = f"importing {target}: {type(error).__name__}: {error}"
        return lambda job, error_fd: _refuse(error_fd, reason)
    return lambda job, error_fd: _call(function, KINDS[kind], job, error_fd)


def _refuse(error_fd: int, reason: str) -> None:
    os.write(error_fd, reason.encode())
    os._exit(127)


def _call(
    function: Callable[..., Any],
    argument: Callable[..., Any],
    job: Job,
    error_fd: int,
) -> None:
    os.close(error_fd)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(job["env"])
        _seed(job["call"]["argument"].get("seed"))
        result = function(_typed(argument, job["call"]["argument"]))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        Path(job["call"]["result"]).write_text(json.dumps(result))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 (the end of the process: it belongs in its log)
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _typed(kind: Callable[..., Any], fields: dict[str, Any]) -> Any:
    paths = {"workspace", "agent_log"}
    return kind(**{k: Path(v) if k in paths else v for k, v in fields.items()})


async def _awaited(result: Any) -> Any:
    return await result


def _seed(seed: int | None) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))


if __name__ == "__main__":
    main()
