"""Weights that engines stage in shared memory: the trainer waits for each engine's report."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch

from tests.trainer.fake_engine import FakeEngine, serving
from trainer.errors import WeightSyncError
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.transports import SharedMemoryTransport

WEIGHTS = [("norm", torch.ones(3))]


class Reporting(FakeEngine):
    """Reports what it is given, byte by byte: a read may end in the middle of a line."""

    lines: tuple[dict[str, str], ...] = ()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, object]:
        if path == "/init_weight_transfer_engine":
            told = body["init_info"]
            self.is_dead = not self.lines
            pipe = os.open(told["report"], os.O_WRONLY)
            for line in self.lines:
                for byte in json.dumps({"digest": told["digest"]} | line) + "\n":
                    os.write(pipe, byte.encode())
            os.close(pipe)
            return {}
        return super().answer(path, body)


def test_reports_about_other_weights_are_ignored() -> None:
    engine = Reporting()
    engine.lines = ({"digest": "old", "reason": "late"}, {"reason": "no memory"})
    with serving(engine) as (_, url):
        transport = SharedMemoryTransport(EngineControl([url]))
        transport.stage(WEIGHTS, None)
        assert transport.unstaged == ["no memory"]
        engine.lines = ({"reason": ""},)
        transport.stage(WEIGHTS, None)
        assert transport.unstaged == []
        transport.close()


def test_engine_that_dies_while_it_stages_ends_the_wait() -> None:
    with serving(Reporting()) as (_, url):
        transport = SharedMemoryTransport(EngineControl([url]))
        with pytest.raises(WeightSyncError, match=f"{url}: the engine died while it staged"):
            transport.stage(WEIGHTS, None)
        transport.close()


def test_end_of_the_process_that_holds_the_memory_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(FakeEngine()) as (_, url):
        transport = SharedMemoryTransport(EngineControl([url]))
        holder = int(transport.segment.report_path.split("/")[2])
        reads, read = list[bytes](), os.read

        def counted(fd: int, size: int) -> bytes:
            assert len(reads) < 5, "it reads for ever"
            reads.append(read(fd, size))
            return reads[-1]

        monkeypatch.setattr(os, "read", counted)
        monkeypatch.setattr(
            EngineControl,
            "init_weight_transfer_engine",
            lambda *_: os.kill(holder, signal.SIGKILL),
        )
        with pytest.raises(WeightSyncError, match="holds the weights' shared memory has ended"):
            transport.stage(WEIGHTS, None)
        transport.close()
