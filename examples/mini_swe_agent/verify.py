"""The verifier: exit code 0 if the folder has the right outcome, else 1.

With the argument `submitted`, mini-swe-agent must also have submitted its work.
"""

import json
import os
import sys
from pathlib import Path

from shell_tasks import is_done


def main() -> int:
    task = json.loads(Path(os.environ["TASK_FILE"]).read_text(encoding="utf-8"))
    done = is_done(Path.cwd(), task["kind"], task["source"], task["target"])
    submitted = "submitted" not in sys.argv[1:] or exit_status() == "Submitted"
    print(f"done: {done}, submitted: {submitted}")
    return 0 if done and submitted else 1


def exit_status() -> str:
    """The exit status that mini-swe-agent wrote into the record of its run."""
    try:
        record = json.loads(
            (Path(os.environ["TRIAL_DIR"]) / "mini.json").read_text(encoding="utf-8")
        )
    except FileNotFoundError:
        return "no record"
    return str(record["info"].get("exit_status"))


if __name__ == "__main__":
    sys.exit(main())
