"""`agentic-train` with `chaos_engine` instead of vLLM, which stops at each point of its steps:

    python -m tests.attacks.chaos_program TOLD ANSWERED ARGUMENT…

It writes each point's name and its own process id as a line to the descriptor TOLD, and goes on
when it has read a byte from ANSWERED.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from proxy.engines.vllm_server import VllmServer
from trainer.cli import main
from trainer.commands import early

POINTS = {
    "trainer.run.log:RunLog.phase": "a phase begins",
    "agent_loop.remote_agent_loop:_TrialRun._launch": "an agent is started",
    "trainer.policy.policy:Policy.step": "a mini-batch is stepped",
    "trainer.weight_sync.segment:SegmentWriter.write": "weights are written",
    "trainer.weight_sync.control:EngineControl.init_weight_transfer_engine": "weights are staged",
    "trainer.weight_sync.control:EngineControl.start_weight_update": "an update starts",
    "trainer.weight_sync.control:EngineControl.update_weights": "an update is sent",
    "trainer.weight_sync.control:EngineControl.finish_weight_update": "an update is finished",
    "trainer.weight_sync.control:EngineControl.resume": "engines go on",
    "trainer.checkpoint:_export": "a checkpoint is exported",
    "trainer.extras.ledger.ledger:Ledger.write": "the ledger is written",
}
"""Where the program stops, and what happens there."""


def stop_at(where: str, told: int, answered: int) -> None:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    honest = getattr(owner, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        os.write(told, f"{os.getpid()} {POINTS[where]}\n".encode())
        os.read(answered, 1)
        return honest(*args, **kwargs)

    setattr(owner, name, stopping)


def _command(self: VllmServer, key_fd: int) -> list[str]:
    checkpoint = self._arguments[self._arguments.index("--model") + 1]
    program = [sys.executable, "-m", "tests.attacks.chaos_engine"]
    return [*program, self.host, str(self.port), str(key_fd), checkpoint]


if __name__ == "__main__":
    VllmServer.command = _command  # type: ignore[method-assign]
    early.engines_to_start = lambda sources: (0, {})
    for each in POINTS:
        stop_at(each, int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
