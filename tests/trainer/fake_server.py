"""An engine that is started like the trainer's engines, with `fake_engine` instead of vLLM."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from proxy.engines.vllm_server import VllmServer
from tests.trainer import fake_engine


class FakeServer(VllmServer):
    def command(self, key_fd: int) -> list[str]:
        if not self.answers:
            return [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
        server = sys.executable, str(fake_engine.__file__)
        return [*server, self.host, str(self.port), str(key_fd)]

    @property
    def guard(self) -> int:
        """The process id of the server's guard, which ends when the server has ended."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kills the server with `kill -9`. Its guard, the child of this process, reports the
        end."""
        children = Path(f"/proc/{self.guard}/task/{self.guard}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
