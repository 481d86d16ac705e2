"""The scripted expert of the warm-up, which makes mistakes on purpose.

Its transcripts contain exactly the messages that Codex sends (`tests/e2e/agents` compares them with
the real agent's); its calls are not run, and their results are written here.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from examples.repositories import experts
from examples.repositories.tasks import OPERATORS, File, new_repository, new_task
from examples.starter_model.transcripts import Transcript

SYSTEM = "You work on a folder of Python files."
"""The file that the configuration gives as model_instructions_file."""
TOOLS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("tools.json").read_text(encoding="utf-8")
)
"""What the agent offers with the keys of agentic_trainer.yaml."""
RAN = (
    "Chunk ID: {chunk:06x}\nWall time: {wall_s:.4f} seconds\nProcess exited with code 0\n"
    "Original token count: {count}\nOutput:\n{text}"
)
PATCHED = (
    "Wall time: {wall_s:.4f} seconds\nOutput:\nExit code: 0\nWall time: 0 seconds\nOutput:\n"
    "Success. Updated the following files:\nM {file}.py\n"
)
NOT_FOUND = (
    "apply_patch verification failed: Failed to find expected lines in {folder}/{file}.py:\n{lines}"
)
CHANGING = re.compile(r"Chunk ID: \w{6}|Wall time: \d+\.\d{4} seconds|lines in /\S+/(?=\w+\.py:)")
"""What differs from run to run in the results of the same calls."""
DONE = "Done."


def transcript(rng: random.Random) -> Transcript:
    """One run of the agent on one task, possibly with mistakes."""
    repository = new_repository(rng)
    return played(repository, new_task(rng, repository), rng)


def played(repository: list[File], task: dict[str, str], rng: random.Random) -> Transcript:
    """A run on this task."""
    file = next(each for each in repository if each.name == task["file"])
    run = Run(task["prompt"], rng)
    if rng.random() >= experts.STOPS_AT_ONCE:
        if task["kind"] == "find":
            _find(run, task)
        else:
            _change(run, task, file, repository)
    return Transcript([*run.messages, {"role": "assistant", "content": DONE}], TOOLS)


class Run(experts.Run):
    """The messages so far."""

    def __init__(self, prompt: str, rng: random.Random) -> None:
        self.rng = rng
        super().__init__(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        )

    def shell(self, command: str, output: str) -> None:
        """Adds a command that the shell runs."""
        count = -(-len(output) // 4)
        chunk, wall_s = self.rng.randrange(16**6), self._wall_s()
        result = RAN.format(chunk=chunk, wall_s=wall_s, count=count, text=output)
        self.call("exec_command", result, cmd=command)

    def patch(self, file: str, old: str, new: str, *, found: bool) -> None:
        """Adds a patch of the line `old`; `found`: whether the file has this line."""
        if found:
            result = PATCHED.format(wall_s=self._wall_s(), file=file)
        else:
            folder = f"/tmp/{self.rng.randrange(16**8):08x}"
            result = NOT_FOUND.format(folder=folder, file=file, lines=old)
        self.call("exec_command", result, cmd=patch(file, old, new))

    def _wall_s(self) -> float:
        return self.rng.choice((0, 0, self.rng.random() / 10))


def patch(file: str, old: str, new: str) -> str:
    """The command that replaces a line of the file."""
    return (
        f"apply_patch <<'P'\n*** Begin Patch\n*** Update File: {file}.py\n@@\n-{old}\n+{new}\n"
        "*** End Patch\nP"
    )


def edit(task: dict[str, str], file: File, wanted: str) -> tuple[str, str]:
    """The line to replace, and the one in its place, if `wanted` is to be the outcome."""
    left, right = file.parameters
    if task["kind"] == "fix":
        new = OPERATORS[wanted][0]
        return f"    return {left} {file.operator} {right}", f"    return {left} {new} {right}"
    if task["kind"] == "set":
        return f'{file.constant} = "{file.word}"', f'{file.constant} = "{wanted}"'
    return f"def {file.function}({left}, {right}):", f"def {wanted}({left}, {right}):"


def _find(run: Run, task: dict[str, str]) -> None:
    line = f'grep -l "def {task["function"]}(" *.py'
    if run.rng.random() < experts.ONLY_SHOWS:
        run.shell(line, f"{task['file']}.py\n")
    else:
        run.shell(f"{line} > answer.txt", "")


def _change(run: Run, task: dict[str, str], file: File, repository: list[File]) -> None:
    for step, wanted in experts.steps(task, file, run.rng):
        old, new = edit(task, file, wanted)
        if step == "unread":
            other = next(each for each in repository if each is not file).parameters
            guess = f"({other[0]}, {other[1]}):"
            old, new = f"def {file.function}{guess}", f"def {wanted}{guess}"
        if step == "read":
            run.shell(f"cat {file.name}.py", file.text)
        elif step == "wrong":
            run.patch(file.name, f"{old} #", new, found=False)
        else:
            run.patch(file.name, old, new, found=step == "edit")
