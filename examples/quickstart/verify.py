"""The verifier: exit code 0 if `answer.txt` in its working directory is right, else 1."""

import json
import os
import sys
from pathlib import Path

from shop import right_answer


def main() -> int:
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text())
    try:
        answer = Path("answer.txt").read_text().strip()
    except FileNotFoundError:
        print("the agent gave no answer")
        return 1
    wanted = right_answer(task["order"], task["prices"])
    print(f"answered {answer!r}, wanted {wanted!r}")
    return 0 if answer == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
