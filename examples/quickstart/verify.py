"""Scores a finished trial: whether `answer.txt` in the agent's working directory is right.

As a program (`main`, for `remote_agent.verifier`), exit code 0 means right and 1 means wrong. As a
function (`grade`, for `remote_agent.grader`), it returns the reward.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shop import right_answer

if TYPE_CHECKING:
    from agent_loop.launchers.calls import GradeCall


def main() -> int:
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text(encoding="utf-8"))
    return 0 if is_right(task, Path.cwd()) else 1


def grade(call: GradeCall) -> float:
    return float(is_right(call.task, call.workspace))


def is_right(task: Mapping[str, Any], workspace: Path) -> bool:
    try:
        answer = (workspace / "answer.txt").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        print("the agent gave no answer")
        return False
    wanted = right_answer(task["order"], task["prices"])
    print(f"answered {answer!r}, wanted {wanted!r}")
    return answer == wanted


if __name__ == "__main__":
    sys.exit(main())
