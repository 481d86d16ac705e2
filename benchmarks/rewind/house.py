"""The houses: ten rooms with two doors each. A sign names the right one; the other one leads on,
too, so that only the end is a success or a failure.

This module imports only the standard library, because the agent's process uses it.
"""

from __future__ import annotations

import random
from typing import Any

ROOMS = 10
DOORS = ("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver")
END = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The output with which mini-swe-agent ends."""

GO = """#!/bin/sh
echo "$1" >> moves
exec 3< moves 4< rooms
while read -r _ <&3; do read -r _ <&4; done
read -r room <&4 && echo "$room"
"""
"""The program `go`: notes the door and shows the next room, whether the door was right or not."""


def new_house(rng: random.Random, count: int = ROOMS) -> dict[str, Any]:
    """A task's data: all `rooms`, the `right` doors and the `prompt`, which is the first room."""
    rooms, right = [], []
    for _ in range(count):
        both = rng.sample(DOORS, 2)
        right.append(rng.choice(both))
        rooms.append(f"Sign: {right[-1]}. Doors: {' '.join(both)}.")
    return {"prompt": rooms[0], "rooms": rooms, "right": right}


def other_door(room: str, right: str) -> str:
    """The wrong door of a room, as it is shown."""
    both = room.rpartition("Doors: ")[2].removesuffix(".").split()
    return both[1] if both[0] == right else both[0]
