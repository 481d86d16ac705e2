"""A server that calls a Python function, each time in a process of its own.

It is started as `python -m … FD WALL MODULE:ARGUMENT MODULE:FUNCTION`, where WALL is the file of
`proxy/wall.py` and ARGUMENT is the class of the function's argument. `path/to/file.py` in place of
MODULE names a file, which can import the modules in its folder. The server imports the function's
module once, and makes the first use of a model SDK that it imports (`rehearsal.py`); each call then
runs in a fork of its own, under a supervisor (`supervisor.py`), and can be killed. Invariant: no
call sees the effects of another call. Random generators are seeded in each call, because otherwise
all forks would draw the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from agent_loop.processes.job_server import Body, Job, refusing, serve
from agent_loop.processes.seals import sealed


def main() -> None:
    fd, wall_file, argument, target = sys.argv[1:]
    serve(socket.socket(fileno=int(fd)), _body(_imported(argument), target), wall_file)


def _imported(target: str) -> Callable[..., Any]:
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        file = Path(module).absolute()
        sys.path.insert(0, str(file.parent))
        module = file.stem
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _body(argument: Callable[..., Any], target: str) -> Body:
    try:
        function = _imported(target)
        _rehearse()
    except Exception as error:  # noqa: BLE001 (the user's module may raise anything)
        return refusing(f"importing {target}: {type(error).__name__}: {error}")
    return lambda job, error_fd: _call(function, argument, job, error_fd)


def _rehearse() -> None:
    if "openai" in sys.modules:
        # Imported here, because its HTTP server would make the forks of all other functions slower.
        from agent_loop.processes.rehearsal import rehearse

        rehearse()


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
        text = sealed(json.dumps(result, default=_number), job["call"].get("seal"))
        Path(job["call"]["result"]).write_text(text, encoding="utf-8")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and code is not error.code:
            _attempt(partial(print, error.code, file=sys.stderr))  # as Python does
    except BaseException:  # noqa: BLE001 (ends the process; the traceback goes to its log)
        _attempt(traceback.print_exc)
    _attempt(lambda: sys.stdout.flush())
    _attempt(lambda: sys.stderr.flush())
    os._exit(code)


def _number(value: Any) -> Any:
    """A scalar of NumPy or PyTorch as a number, which JSON alone does not know."""
    if not hasattr(value, "item"):
        raise TypeError(f"returned {type(value).__name__}, which is no number and no part of JSON")
    return value.item()


def _attempt(output: Callable[[], None]) -> None:
    """The function may have closed its streams, or put anything in their place: its result and exit
    code are what they are all the same."""
    with contextlib.suppress(Exception):
        output()


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
