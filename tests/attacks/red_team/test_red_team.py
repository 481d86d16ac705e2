"""Each trick of the red team works without a wall, and none works behind one.

`make red-team` plays them with every launcher and every wall that this machine has.
"""

from __future__ import annotations

import os

import pytest

from proxy import wall
from proxy.machine import landlock
from tests.attacks.red_team.place import Played, place, play
from tests.attacks.red_team.tricks import LEFT, TRICKS, left_out
from tests.proxy.conftest import RunningProxy

REFUSED = wall.missing() or landlock.missing_scopes()
pytestmark = pytest.mark.skipif(
    REFUSED is not None, reason=f"this machine has not the whole wall: {REFUSED}"
)
PLAYED = set(LEFT) | (set(TRICKS) - set(left_out()))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the strict wall needs root")


async def played(proxy: RunningProxy, launcher: str, sandbox: str) -> Played:
    async with place() as at:
        return await play(proxy, at, launcher, sandbox)


async def test_every_trick_works_without_a_wall(proxy: RunningProxy) -> None:
    open_ = await played(proxy, "command", "off")
    assert set(open_.fooled) == set(LEFT)
    failed = {name: open_.tricks.get(name) for name in PLAYED - open_.worked}
    assert not failed


@pytest.mark.parametrize(
    ("launcher", "sandbox"),
    [
        ("command", "light"),
        pytest.param("python", "light", marks=pytest.mark.slow),
        pytest.param("command", "strict", marks=[pytest.mark.slow, needs_root]),
        pytest.param("python", "strict", marks=[pytest.mark.slow, needs_root]),
    ],
)
async def test_no_trick_works_behind_a_wall(
    launcher: str, sandbox: str, proxy: RunningProxy
) -> None:
    behind = await played(proxy, launcher, sandbox)
    assert set(behind.fooled) == set(LEFT)
    assert not {name for name in TRICKS if name in PLAYED} - set(behind.tricks)
    assert not behind.worked, {name: behind.tricks.get(name) for name in behind.worked}
