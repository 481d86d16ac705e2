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
from trainer.weight_sync.segment import SegmentReader, Written
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


@pytest.mark.parametrize(
    "call", ["init_weight_transfer_engine", "start_weight_update", "update_weights"]
)
def test_process_that_holds_the_memory_is_replaced_at_any_moment_of_an_update(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, kills = getattr(EngineControl, call), [True]

    def killed_once(control: EngineControl, *arguments: Any) -> None:
        if kills:
            kills.pop()
            os.kill(holder := int(transport.segment.path.split("/")[2]), signal.SIGKILL)
            os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
            if call != "init_weight_transfer_engine":  # which answers, and whose workers cannot
                raise WeightSyncError(f"there is no {transport.segment.path}")
        honest(control, *arguments)

    monkeypatch.setattr(EngineControl, call, killed_once)
    with serving(FakeEngine()) as (engine, url):
        control = EngineControl([url])
        control.next_version = 3
        transport = SharedMemoryTransport(control)
        first = transport.segment.path
        transport.stage(WEIGHTS, None)
        transport.send()
        assert transport.segment.path != first
        _, tensor = SegmentReader().receive(Written(transport.segment.path, *written(transport)))[0]
        torch.testing.assert_close(tensor, WEIGHTS[0][1])
        assert engine.version == "3"
        transport.close()


def written(transport: SharedMemoryTransport) -> tuple[int, str]:
    assert transport._written is not None
    return transport._written.size_bytes, transport._written.digest
