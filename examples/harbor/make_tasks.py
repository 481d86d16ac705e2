"""Writes the shell tasks of `examples/mini_swe_agent` as Harbor task folders.

`python -m examples.harbor.make_tasks --out DIR` makes DIR/train and DIR/heldout. Invariant: tasks,
files and verdicts are the same as in that example. A verifier checks only the outcome of its task.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from examples.mini_swe_agent.shell_tasks import WORKSPACE, command, expected

_HERE = Path(__file__).parent
_TASKS = _HERE.with_name("mini_swe_agent")
_TOML = """schema_version = "1.4"

[task]
name = "shell-tasks/{name}"

[metadata]
kind = "{kind}"

[agent]
timeout_sec = 120

[verifier]
timeout_sec = 30
"""
_DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY files/ ./\n"
_SOLVE = "#!/bin/bash\n{command}\n"
_VERIFY = """#!/bin/bash
# `right`: the file asked for holds what it should; `kept`: the source is still there, or is gone
# where it was to be renamed. Both make the reward.
[ "$(echo $(cat {target}.txt))" = "{wanted}" ] && right=1 || right=0
[ -e {source}.txt ] && found=1 || found=0
[ $found = {stays} ] && kept=1 || kept=0
echo "{{\\"reward\\": $((right * kept)), \\"right\\": $right, \\"kept\\": $kept}}" \\
  > /logs/verifier/reward.json
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    for split in ("train", "heldout"):
        shutil.rmtree(out / split, ignore_errors=True)
        for line in (_TASKS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            write_task(out / split, json.loads(line))


def write_task(root: Path, task: dict[str, str]) -> Path:
    kind, source, target = task["kind"], task["source"], task["target"]
    folder = root / task["task_id"]
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    shutil.copytree(WORKSPACE, folder / "environment/files")
    files = {
        "task.toml": _TOML.format(name=task["task_id"], kind=kind),
        "instruction.md": task["prompt"],
        "environment/Dockerfile": _DOCKERFILE,
        "solution/solve.sh": _SOLVE.format(command=command(kind, source, target)),
        "tests/test.sh": _VERIFY.format(
            source=source,
            target=target,
            wanted=" ".join(expected(kind, source)),
            stays=0 if kind == "rename" else 1,
        ),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
