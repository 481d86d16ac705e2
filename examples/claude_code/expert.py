"""The scripted expert of the warm-up, which makes mistakes on purpose.

Its transcripts contain exactly the messages that Claude Code sends (`tests/examples` compares them
with the real agent's); its calls are not run, and their results are written here.
"""

from __future__ import annotations

import json
import random
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from examples.repositories import experts
from examples.repositories.tasks import File, new_repository, new_task
from examples.starter_model.transcripts import Message, Transcript

SYSTEM = (
    "You are a Claude agent, built on Anthropic's Claude Agent SDK.\n"
    "You work on a folder of Python files."
)
"""The agent's own first line, and what the configuration gives as --system-prompt."""
TOOLS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("tools.json").read_text(encoding="utf-8")
)
"""What the agent offers with `--bare --tools Bash,Read,Edit`."""
REMINDER = """<system-reminder>
As you answer the user's questions, you can use the following context:
# currentDate
Today's date is {date}.

      IMPORTANT: this context may or may not be relevant to your tasks. You should not respond to \
this context unless it is highly relevant to your task.
</system-reminder>


"""
EDITED = (
    "The file {file}.py has been updated successfully. (file state is current in your context — no "
    "need to Read it back)"
)
NOT_READ = (
    "<tool_use_error>File has not been read yet. Read it first before writing to it."
    "</tool_use_error>"
)
NOT_FOUND = "<tool_use_error>String to replace not found in file.\nString: {text}</tool_use_error>"
NOTHING = "(Bash completed with no output)"
DONE = "Done."


def transcript(rng: random.Random) -> Transcript:
    """One run of the agent on one task, possibly with mistakes."""
    repository = new_repository(rng)
    task = new_task(rng, repository)
    day = date(2026, 1, 1) + timedelta(days=rng.randrange(1500))
    return played(repository, task, day, rng)


def played(
    repository: list[File], task: dict[str, str], day: date, rng: random.Random
) -> Transcript:
    """A run on this task and day."""
    file = next(each for each in repository if each.name == task["file"])
    run = experts.Run(
        [{"role": "system", "content": SYSTEM}, asked(task["prompt"], day.isoformat())]
    )
    if rng.random() >= experts.STOPS_AT_ONCE:
        if task["kind"] == "find":
            _find(run, task, rng)
        else:
            _change(run, task, file, rng)
    return Transcript([*run.messages, {"role": "assistant", "content": DONE}], TOOLS)


def asked(prompt: str, day: str) -> Message:
    """The first message of the user, as Claude Code writes it."""
    return {"role": "user", "content": REMINDER.format(date=day) + prompt}


def shown(file: File) -> str:
    """The result of reading a file."""
    return "\n".join(f"{at}\t{line}" for at, line in enumerate(file.text.split("\n"), 1))


def _find(run: experts.Run, task: dict[str, str], rng: random.Random) -> None:
    line = f'grep -l "def {task["function"]}(" *.py'
    if rng.random() < experts.ONLY_SHOWS:
        run.call("Bash", f"{task['file']}.py", command=line)
    else:
        run.call("Bash", NOTHING, command=f"{line} > answer.txt")


def _change(run: experts.Run, task: dict[str, str], file: File, rng: random.Random) -> None:
    path = f"{file.name}.py"
    for step, wanted in experts.steps(task, file, rng):
        old, new = experts.replaced(task, file, wanted)
        if step == "read":
            run.call("Read", shown(file), file_path=path)
            continue
        result = NOT_READ if step == "unread" else EDITED.format(file=file.name)
        if step == "wrong":
            old = experts.not_there(task, old)
            result = NOT_FOUND.format(text=old)
        run.call("Edit", result, file_path=path, old_string=old, new_string=new)
