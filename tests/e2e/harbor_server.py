"""A real `harbor-server` from `.harbor/` in its own process; its token is in the environment."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from harbor_sdk.sandbox import SandboxError, require_privilege
from tests.needs import needs

HARBOR = Path(__file__).resolve().parents[2] / os.environ.get("HARBOR", ".harbor")
"""The environment that `make harbor` creates; set it to test another version of Harbor."""
PROGRAM = HARBOR / "bin/harbor-server"


def refused() -> str | None:
    """Why this machine refuses a sandbox; None if it does not."""
    try:
        require_privilege()
    except SandboxError as error:
        return str(error)
    return None


needs_harbor = [
    pytest.mark.skipif(refused() is not None, reason=refused() or ""),
    needs(None if PROGRAM.exists() else f"no {HARBOR}: make harbor (Python 3.12)"),
]


class HarborServer:
    def __init__(self, process: subprocess.Popen[bytes], url: str, state_dir: Path) -> None:
        self.process = process
        self.url = url
        self.state_dir = state_dir

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def harbor_server(state_dir: Path, *flags: str) -> Iterator[HarborServer]:
    state_dir.mkdir(parents=True, exist_ok=True)
    log = state_dir / "server.log"
    # Without the token of another server that a fixture has set: this one creates its own.
    env = {name: value for name, value in os.environ.items() if name != "HARBOR_SERVER_TOKEN"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(PROGRAM), "--port", "0", "--state-dir", str(state_dir), *flags],
            stdout=subprocess.PIPE,
            stderr=output,
            env={**env, "PYTHONPATH": ""},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(b"harbor-server on "), log.read_text()
        token = (state_dir / "token").read_text()
        with patch.dict(os.environ, HARBOR_SERVER_TOKEN=token):
            yield HarborServer(process, line.split()[-1].decode(), state_dir)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
