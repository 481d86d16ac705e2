"""A reward with parts: half of it for an answer at all (`remote_agent.grader`).

The function is called in a process of its own. The entry `reward` is trained, and the others are
logged. None instead of a dictionary is *no reward*.
"""

from __future__ import annotations

from agent_loop.launchers.calls import GradeCall
from examples.quickstart.shop import right_answer


def grade(call: GradeCall) -> dict[str, float]:
    file = call.workspace / "answer.txt"
    if not file.exists():
        return {"reward": 0.0, "right": 0.0, "answered": 0.0}
    right = file.read_text(encoding="utf-8").strip() == right_answer(
        call.task["order"], call.task["prices"]
    )
    return {"reward": 0.5 + right / 2, "right": float(right), "answered": 1.0}
