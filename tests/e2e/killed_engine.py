"""`agentic-train` whose engine is killed (SIGKILL) while its N-th request to a route waits:

python -m tests.e2e.killed_engine ROUTE N server|core ARGUMENT…
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tests.processes import command_line, descendants
from trainer.cli import main
from trainer.weight_sync.control import EngineControl

SERVER = f"{sys.executable} -m proxy.engines.vllm_launch"


def kill_engine(part: str) -> None:
    """Kills the API server, or only its engine process, after which the server still runs."""
    for pid in descendants(os.getpid()):
        line = command_line(pid)
        if line.startswith(SERVER) if part == "server" else "EngineCore" in line:
            os.kill(pid, signal.SIGKILL)


def kill_at(route: str, request: int, part: str) -> None:
    honest, left = EngineControl._await_answer, [request]

    def deadly(self: Any, connection: Any, method: str, engine: str, path: str) -> None:
        if path == route:
            left[0] -= 1
            if not left[0]:
                kill_engine(part)
        honest(self, connection, method, engine, path)

    EngineControl._await_answer = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_at(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    sys.exit(main(sys.argv[4:]))
