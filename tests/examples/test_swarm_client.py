"""The swarm's example client ends with success only if the training is done."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from agent_loop.extras.swarm import EngineState, SwarmError
from examples.swarm import client
from tests.examples.test_starter_model import EXAMPLES


class ScriptedSwarm:
    """A swarm whose engine has these states, one after each episode that it refuses."""

    def __init__(self, states: list[EngineState]) -> None:
        self.client_id = "client"
        self.starts = 0
        self._states = states
        self._now = EngineState.ROLLING

    def __call__(self, url: str) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def auto_start(self, config: str) -> Any:
        self.starts += 1
        return self.status()

    def status(self) -> Any:
        return SimpleNamespace(state=self._now, version=0, detail="")

    @contextmanager
    def episode(self, task_id: str) -> Iterator[Any]:
        if self._states:
            self._now = self._states.pop(0)
        raise SwarmError("no engine", "no_engine")
        yield


@pytest.mark.parametrize(
    ("states", "code", "starts"),
    [
        ([EngineState.DONE], 0, 1),
        ([EngineState.OFFLINE], 1, 1),
        ([EngineState.ERROR], 1, 1),
        ([EngineState.INTERRUPTED, EngineState.DONE], 0, 2),  # the server was killed
        ([EngineState.INTERRUPTED, EngineState.SYNCING, EngineState.OFFLINE], 1, 2),
    ],
)
def test_client_resumes_an_interrupted_run_and_succeeds_only_when_it_is_done(
    states: list[EngineState], code: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = ScriptedSwarm(states)
    monkeypatch.setattr(client, "SwarmClient", swarm)
    tasks = Path(EXAMPLES, "quickstart/train.jsonl")
    argv = ["client", "http://127.0.0.1:1", "--tasks", str(tasks), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    assert client.main() == code
    assert swarm.starts == starts
