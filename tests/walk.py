"""Counts the files that a request passes, from its handler to the last byte of the answer.

    python -m tests.walk            # the third request of a session, not streamed
    python -m tests.walk --each     # and every step, with the functions that ran

The value moves to a file when a line of it runs. Not counted are calls of at most 10 lines of code
(docstrings are none) that call no longer function of the proxy, and a coroutine that only waits for
another one, because no line of it runs afterwards. A return is a step to a file that was passed
before. Threads (the writer of the store) and the scripted engine are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from proxy.config import RenderingConfig
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.conftest import starting_proxies

PACKAGE = Path(__file__).parent.parent / "proxy"
OUTSIDE = ("testing/", "client.py")
"""Files of the package that run in this process and are no part of the proxy that is measured."""
PURE_LINES = 10
QUIET_S = 0.5
"""What the earlier requests left to be done in the background is done after this time."""


@dataclass(slots=True)
class Activation:
    """One run of a function, until it returns or waits: its lines and calls in order."""

    file: str
    code: CodeType
    steps: list[Activation | int] = field(default_factory=list)

    @property
    def is_counted(self) -> bool:
        """Whether it is longer than a pure call, or calls such a function."""
        lines = {line for _, _, line in self.code.co_lines() if line is not None}
        long = len(lines - {self.code.co_firstlineno}) > PURE_LINES
        return long or any(isinstance(s, Activation) and s.is_counted for s in self.steps)

    def walk(self) -> list[tuple[str, str]]:
        """The file and the function of every line that counts, in order."""
        if not self.is_counted:
            return []
        found: list[tuple[str, str]] = []
        for step in self.steps:
            own = [(self.file, self.code.co_qualname)]
            found += step.walk() if isinstance(step, Activation) else own
        return found


class Trace:
    """What ran in the event loop between `start` and `stop`."""

    def __init__(self) -> None:
        self._root = Activation("", compile("", "", "exec"))
        self._open: dict[FrameType, Activation] = {}

    def start(self) -> None:
        sys.settrace(self._called)

    def stop(self) -> list[tuple[str, list[str]]]:
        """The files that were passed, in order, each with the functions that ran there until the
        next one."""
        sys.settrace(None)
        lines = [
            line
            for step in self._root.steps
            if isinstance(step, Activation)
            for line in step.walk()
        ]
        return [
            (file, list(dict.fromkeys(function for _, function in there)))
            for file, there in groupby(lines, key=itemgetter(0))
        ]

    def _called(self, frame: FrameType, _: str, __: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(PACKAGE):
            return None
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(OUTSIDE) or frame.f_code.co_name in ("<genexpr>", "<module>"):
            return None
        parent = frame.f_back
        while parent is not None and parent not in self._open:
            parent = parent.f_back
        into = self._root if parent is None else self._open[parent]
        activation = Activation(file, frame.f_code)
        into.steps.append(activation)
        self._open[frame] = activation
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame in self._open:
            self._open[frame].steps.append(frame.f_lineno)
        elif event == "return":
            self._open.pop(frame, None)
        return self._stepped


async def walk() -> list[tuple[str, list[str]]]:
    """The files that the third request of a session passes, in order, with the functions there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write_checkpoint(folder)
        rendering = Rendering(load_tokenizer(checkpoint), RenderingConfig())
        async with starting_proxies(checkpoint, rendering, folder) as start:
            proxy = await start()
            session = await proxy.session()
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi."}]
            trace = Trace()
            for number in range(3):
                if number == 2:
                    await asyncio.sleep(QUIET_S)
                    trace.start()
                body = {"model": "some-model", "messages": messages}
                status, reply = await proxy.post(session, "chat/completions", body)
                assert status == 200, reply
                messages.append(reply["choices"][0]["message"])
                messages.append({"role": "user", "content": f"And {number}?"})
            return trace.stop()


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description="Counts the files that a request passes.")
    parser.add_argument("--each", action="store_true", help="print every step")
    given = parser.parse_args()
    steps = asyncio.run(asyncio.wait_for(walk(), 60))
    if given.each:
        print("\n".join(f"{file}  {', '.join(functions)}" for file, functions in steps))
    passed = {file for file, _ in steps}
    print(f"{len(passed)} files, {len(steps) - len(passed)} returns")


if __name__ == "__main__":
    main()
