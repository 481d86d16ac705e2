"""`agentic-train trace RUN`: writes what a run did when, for https://ui.perfetto.dev."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from proxy.extras.view.run_folder import reading
from proxy.extras.view.trace import trace_pieces
from trainer.commands.runs import reporting
from trainer.errors import ConfigError
from trainer.run.folder import RunFolder


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train trace`; returns its exit code."""

    def write() -> int:
        folder = RunFolder.open(arguments.run)
        out: Path = arguments.out or folder.path / "trace.json"
        asyncio.run(_write(folder, out))
        print(f"{out}: open it at https://ui.perfetto.dev or chrome://tracing")
        return 0

    return reporting("agentic-train trace", write)


async def _write(folder: RunFolder, out: Path) -> None:
    try:
        with out.open("wb") as file:
            if not folder.sessions.is_file():
                async for piece in trace_pieces(folder.path, None):
                    file.write(piece)
                return
            async with reading(folder.sessions) as browser:
                async for piece in trace_pieces(folder.path, browser):
                    file.write(piece)
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror}); choose another file with -o"
        ) from error
