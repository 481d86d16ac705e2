"""Scores a finished trial: 1 if the code words were said in their order, else 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.compaction.vault import listed

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def grade(call: GradeCall) -> float:
    said = call.workspace / "said"
    words, right = said.read_text() if said.exists() else "", listed(call.task["words"])
    print(f"said {words!r}, right is {right!r}")
    return float(words == right)
