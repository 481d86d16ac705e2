"""Scores a finished trial: 1 if the words of all rooms were said in their order, else 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.compaction.vault import ROOMS, seen

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def grade(call: GradeCall) -> float:
    said = call.workspace / "said"
    words = said.read_text(encoding="utf-8") if said.exists() else ""
    right = seen(dict(zip(ROOMS, call.task["words"], strict=True)))
    print(f"said {words!r}, right is {right!r}")
    return float(words == right)
