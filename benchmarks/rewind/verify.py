"""Scores a finished trial: 1 if all doors were right, else 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def grade(call: GradeCall) -> float:
    moves = call.workspace / "moves"
    went = moves.read_text(encoding="utf-8").split("\n")[:-1] if moves.exists() else []
    print(f"went {went}, right is {call.task['right']}")
    return float(went == call.task["right"])
