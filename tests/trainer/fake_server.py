"""An engine as the trainer starts it, with `fake_engine` in vLLM's place."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from proxy.engines.vllm_server import VllmServer
from tests.trainer import fake_engine


class FakeServer(VllmServer):
    def command(self) -> list[str]:
        return [sys.executable, str(fake_engine.__file__), self.options.host, str(self.port)]

    def kill(self) -> None:
        """With `kill -9`; its guard, which is our child, stays and tells."""
        assert self._process is not None
        guard = self._process.pid
        children = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
