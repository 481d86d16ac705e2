"""Writes small Harbor tasks to a folder. Each asks for `hello-NAME` in answer.txt."""

from __future__ import annotations

from pathlib import Path

_TOML = """schema_version = "1.4"
[task]
name = "own/{name}"
[agent]
timeout_sec = {agent_timeout_s}
[verifier]
timeout_sec = 30
[environment]
"""
_STEP = '[[steps]]\nname = "{step}"\n'
_SOLVE = '#!/bin/bash\nsleep {solve_s}\necho "hello-{name}" > answer.txt\n'
_VERIFY = """#!/bin/bash
if [ "$(cat answer.txt)" = "hello-{name}" ]
then echo '{{"reward": 1.0, "files": 3}}'
else echo '{{"reward": 0.0, "files": 0}}'
fi > /logs/verifier/reward.json
"""
DOCKERFILE = "FROM debian:12\nWORKDIR /app\n"


def write_task(
    root: Path,
    name: str,
    *,
    solve_s: float = 0,
    agent_timeout_s: int = 30,
    solve: str = "",
    verify: str | None = None,
    dockerfile: str = DOCKERFILE,
    steps: tuple[str, ...] = (),
) -> Path:
    """`solve` runs after the answer was written; `verify` replaces the verifier."""
    folder = root / name
    text = _TOML.format(name=name, agent_timeout_s=agent_timeout_s)
    parts = [folder / "steps" / step for step in steps] or [folder]
    for part in parts:
        for inner in ("tests", "solution"):
            (part / inner).mkdir(parents=True)
        (part / "instruction.md").write_text(f"Write hello-{name} into answer.txt.\n")
        (part / "solution/solve.sh").write_text(_SOLVE.format(name=name, solve_s=solve_s) + solve)
        (part / "tests/test.sh").write_text(verify or _VERIFY.format(name=name))
    (folder / "environment").mkdir()
    (folder / "environment/Dockerfile").write_text(dockerfile)
    (folder / "task.toml").write_text(text + "".join(_STEP.format(step=step) for step in steps))
    return folder
