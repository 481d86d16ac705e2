"""The verifier: exit code 0 if the repository has the task's outcome, else 1."""

import json
import os
import sys
from pathlib import Path

from tasks import FOLDER, is_done


def main() -> int:
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text(encoding="utf-8"))
    done = is_done(Path.cwd(), FOLDER / task["repository"], task)
    print(f"done: {done}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
