"""Scores a finished trial: the share of screens on which the right number was typed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from screens import SCREENS, screens

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def grade(call: GradeCall) -> float:
    try:
        typed = json.loads((call.workspace / "typed.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        print("the agent did not finish")
        return 0.0
    right = [
        screen.is_typed(each)
        for screen, each in zip(screens(call.task["seed"]), typed, strict=True)
    ]
    print(f"typed {typed}, right: {right}")
    return sum(right) / SCREENS
