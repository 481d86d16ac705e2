"""Someone who types what a page says: files are written, commands run, outputs compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from queue import Queue
from threading import Thread

from tests.pages import Block

COMMAND_TIMEOUT_S = 1500
SERVER_TIMEOUT_S = 300
NUMBER = re.compile(r" *\d+(?:[.,:]\d+)*(?:e-?\d+)?")
ANY_NUMBER = r" *\d[\d.,:]*(?:e-?\d+)?"


@dataclass
class Reader:
    """Reads one page. `close` ends the servers that the page started."""

    folder: Path
    environment: dict[str, str]
    replaced: dict[str, str]
    """Placeholders of the pages → what they are here."""
    printed: str = ""
    outputs: dict[subprocess.Popen[str], Thread] = field(default_factory=dict)
    """The servers that run, each with the thread that reads its output."""

    def read(self, blocks: Iterable[Block]) -> None:
        for is_program, group in groupby(blocks, lambda b: b.language == "python" and not b.title):
            if is_program:
                self.run_python([block for block in group if not block.directives])
            else:
                for block in group:
                    self.follow(block)

    def follow(self, block: Block) -> None:
        text = self.here(block.text)
        if block.needs or block.directive("run by ") or block.directive("excerpt of "):
            return
        if block.language == "text":
            same = prints(self.printed, text, numbers=block.directive("numbers vary") is None)
            assert same, f"{block.page} says:\n{text}\nprinted:\n{self.printed}"
        elif block.language == "bash":
            if (ready := block.directive("server ")) is not None:
                self.serve(text, ready)
            else:
                self.type(text)
        elif block.title:
            (self.folder / block.title).write_text(text)

    def here(self, text: str) -> str:
        for placeholder, value in self.replaced.items():
            text = text.replace(placeholder, value)
        return text

    def run_python(self, blocks: list[Block]) -> None:
        if blocks:
            program = "\n".join(self.here(block.text) for block in blocks)
            self._run([sys.executable, "-c", program], program)

    def type(self, commands: str) -> None:
        """Runs the commands in a shell; the next ones begin where these end, with the variables
        that these exported."""
        place = Path(self.environment["READER"])
        script = f'trap \'pwd > "$READER"; env -0 > "$READER.env"\' EXIT\n{commands}'
        self._run(["bash", "-euo", "pipefail", "-c", script], commands)
        self.folder = Path(place.read_text().strip())
        variables = place.with_name(place.name + ".env").read_text().split("\0")
        self.environment = dict(each.split("=", 1) for each in variables if "=" in each)

    def serve(self, command: str, ready: str) -> None:
        """Starts a server and returns when it has printed `ready`."""
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"exec {command}"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        lines: Queue[str] = Queue()
        self.outputs[process] = Thread(target=_pass_on, args=(process, lines), daemon=True)
        self.outputs[process].start()
        self.printed = ""
        while ready not in self.printed:
            line = lines.get(timeout=SERVER_TIMEOUT_S)
            assert line, f"{command}\nends without {ready!r}:\n{self.printed}"
            self.printed += line

    def close(self) -> None:
        for process in reversed(self.outputs):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=SERVER_TIMEOUT_S)
            self.outputs[process].join()

    def _run(self, argv: list[str], shown: str) -> None:
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
        self.printed = done.stdout
        assert done.returncode == 0, f"{shown}\n{self.printed}"


def prints(printed: str, page: str, *, numbers: bool = True) -> bool:
    """Whether the output is what the page says; without `numbers`, up to its numbers."""
    lines = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    parts = [re.escape(part) for part in page.strip().split("…")]
    if not numbers:
        parts = [
            ANY_NUMBER.join(re.escape(words) for words in NUMBER.split(part))
            for part in page.strip().split("…")
        ]
    return re.fullmatch(".*?".join(parts), lines, re.S) is not None


def _pass_on(process: subprocess.Popen[str], lines: Queue[str]) -> None:
    """Reads a server's output to its end, which is an empty line."""
    assert process.stdout is not None
    with process.stdout as output:
        for line in output:
            lines.put(line)
    lines.put("")
