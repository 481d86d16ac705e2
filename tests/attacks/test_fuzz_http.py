"""Short fuzz runs of every server; `python -m tests.attacks.fuzz_http` runs longer ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import server
from tests.attacks.bodies import BODIES, CONTROL, HARBOR, SWARM
from tests.attacks.fuzz_http import fuzz
from tests.attacks.hostile import Body
from tests.attacks.planes import PLANES
from tests.attacks.server import Effort, Hang, patiently

REQUESTS = 400


@pytest.mark.parametrize("plane", PLANES)
async def test_hostile_requests_cause_no_500_no_traceback_and_no_open_turn(
    tmp_path: Path, plane: str
) -> None:
    report = await fuzz(plane, tmp_path, REQUESTS, seed=71)
    assert not report.broken, report.summary()
    assert not report.unanswered, report.summary()


@pytest.mark.parametrize("bodies", [BODIES, CONTROL, SWARM, HARBOR])
def test_each_request_starts_from_the_ordinary_body(
    bodies: dict[str, Callable[[], Body]],
) -> None:
    """What was done to one request is not in the next one."""
    for name, body in bodies.items():
        before, changed = deepcopy(body()), body()
        clear(changed)
        assert body() == before, name


def clear(value: Any) -> None:
    """Empties every holder in the value."""
    if isinstance(value, dict | list):
        for inner in list(value.values() if isinstance(value, dict) else value):
            clear(inner)
        value.clear()


class Busy:
    """A server that uses `used_s` of processor time between two looks at it."""

    def __init__(self, used_s: float) -> None:
        self.used_s = used_s
        self.looks = 0
        self.seen = asyncio.Event()
        """Set by the fourth look."""

    def effort(self) -> Effort:
        self.looks += 1
        if self.looks == 4:
            self.seen.set()
        return Effort(self.used_s * self.looks, 0.0)


@pytest.fixture
def idle_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.01)


@pytest.mark.usefixtures("idle_s")
async def test_busy_server_may_take_its_time() -> None:
    busy = Busy(used_s=server.BUSY_S)
    assert await patiently(busy.effort, busy.seen.wait())


@pytest.mark.usefixtures("idle_s")
@pytest.mark.parametrize(
    ("used_s", "why"), [(0.0, "of an idle server"), (server.PROCESSOR_S, "while the server")]
)
async def test_no_answer_of_an_idle_server_or_after_much_work_is_a_hang(
    monkeypatch: pytest.MonkeyPatch, used_s: float, why: str
) -> None:
    monkeypatch.setattr(server, "effort", lambda pids: Effort(0.0, 0.0))
    with pytest.raises(Hang, match=why):
        await patiently(Busy(used_s).effort, asyncio.Event().wait())
