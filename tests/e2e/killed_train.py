"""`agentic-train` that is killed (SIGKILL) when a function is called for the N-th time:

python -m tests.e2e.killed_train MODULE:NAME N ARGUMENT…
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from trainer.cli import main


def kill_at(where: str, call: int) -> None:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    honest, left = getattr(owner, name), [call]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*args, **kwargs)

    setattr(owner, name, deadly)


if __name__ == "__main__":
    kill_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
