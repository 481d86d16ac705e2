"""Scores a finished trial: the share of screens on which the right button was pressed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from screens import SCREENS, screens

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def grade(call: GradeCall) -> float:
    try:
        pressed = json.loads((call.workspace / "pressed.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        print("the agent did not finish")
        return 0.0
    right = [
        screen.is_pressed(each)
        for screen, each in zip(screens(call.task["seed"]), pressed, strict=True)
    ]
    print(f"pressed {pressed}, right: {right}")
    return sum(right) / SCREENS


def grade_claude_code(call: GradeCall) -> float:
    """Whether its last answer presses the right button of the first screen."""
    answer = call.answers[-1]["content"] if call.answers else ""
    right = next(screens(call.task["seed"])).is_pressed(answer or "")
    print(f"answered {answer!r}, right: {right}")
    return float(right)
