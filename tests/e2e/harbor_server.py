"""A real `harbor-server` of `.harbor/` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harbor_sdk.sandbox import SandboxError, require_privilege

PROGRAM = Path(__file__).resolve().parents[2] / ".harbor/bin/harbor-server"
START_TIMEOUT_S = 60.0


def missing() -> str | None:
    """Why real Harbor trials cannot run here."""
    if not PROGRAM.exists():
        return "no .harbor/: make harbor (Python 3.12)"
    try:
        require_privilege()
    except SandboxError as error:
        return str(error)
    return None


needs_harbor = pytest.mark.skipif(missing() is not None, reason=missing() or "")


class HarborServer:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def harbor_server(state_dir: Path, *flags: str) -> AsyncIterator[HarborServer]:
    state_dir.mkdir(parents=True, exist_ok=True)
    log = await asyncio.to_thread((state_dir / "server.log").open, "ab")
    process = await asyncio.create_subprocess_exec(
        *(str(PROGRAM), "--port", "0", "--state-dir", str(state_dir), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        env={**os.environ, "PYTHONPATH": ""},
    )
    log.close()
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        assert line.startswith(b"harbor-server on "), (state_dir / "server.log").read_text()
        yield HarborServer(process, line.split()[-1].decode())
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
