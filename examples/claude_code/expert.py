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

from examples.repositories.tasks import OPERATORS, WORDS, File, new_repository, new_task
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

# Probability of each mistake in the situations where it can be made.
_STOPS_AT_ONCE = 0.03
_EDITS_UNREAD = 0.4
_GIVES_UP = 0.6
_ONLY_READS = 0.4
_WRONG_RESULT = 0.15
_WRONG_TEXT = 0.3
_ONLY_SHOWS = 0.65


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
    run = Run([{"role": "system", "content": SYSTEM}, asked(task["prompt"], day.isoformat())])
    if rng.random() >= _STOPS_AT_ONCE:
        if task["kind"] == "find":
            _find(run, task, rng)
        else:
            _change(run, task, file, rng)
    return Transcript([*run.messages, {"role": "assistant", "content": DONE}], TOOLS)


def asked(prompt: str, day: str) -> Message:
    """The first message of the user, as Claude Code writes it."""
    return {"role": "user", "content": REMINDER.format(date=day) + prompt}


class Run:
    """The messages so far."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def call(self, name: str, result: str, **arguments: str) -> None:
        """Adds a call and its result."""
        call_id = f"call_{len(self.messages)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        self.messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]


def shown(file: File) -> str:
    """The result of reading a file."""
    return "\n".join(f"{at}\t{line}" for at, line in enumerate(file.text.split("\n"), 1))


def edit(task: dict[str, str], file: File, wanted: str) -> tuple[str, str]:
    """The text to replace, and the one in its place, if `wanted` is to be the outcome."""
    left, right = file.parameters
    if task["kind"] == "fix":
        new = OPERATORS[wanted][0]
        return f"return {left} {file.operator} {right}", f"return {left} {new} {right}"
    if task["kind"] == "set":
        return file.word, wanted
    return f"def {file.function}(", f"def {wanted}("


def _find(run: Run, task: dict[str, str], rng: random.Random) -> None:
    line = f'grep -l "def {task["function"]}(" *.py'
    if rng.random() < _ONLY_SHOWS:
        run.call("Bash", f"{task['file']}.py", command=line)
    else:
        run.call("Bash", NOTHING, command=f"{line} > answer.txt")


def _change(run: Run, task: dict[str, str], file: File, rng: random.Random) -> None:
    wanted = task["wanted"]
    if rng.random() < _WRONG_RESULT:
        wanted = _other(task, file, rng)
    old, new = edit(task, file, wanted)
    path = f"{file.name}.py"
    if rng.random() < _EDITS_UNREAD and task["kind"] == "rename":
        run.call("Edit", NOT_READ, file_path=path, old_string=old, new_string=new)
        if rng.random() < _GIVES_UP:
            return
    run.call("Read", shown(file), file_path=path)
    if rng.random() < _ONLY_READS:
        return
    if rng.random() < _WRONG_TEXT:
        wrong = old.replace("return", "return  ") if task["kind"] == "fix" else f"{old} "
        run.call(
            "Edit", NOT_FOUND.format(text=wrong), file_path=path, old_string=wrong, new_string=new
        )
        if rng.random() < _GIVES_UP:
            return
    run.call("Edit", EDITED.format(file=file.name), file_path=path, old_string=old, new_string=new)


def _other(task: dict[str, str], file: File, rng: random.Random) -> str:
    """A wrong outcome that changes the file."""
    if task["kind"] == "fix":
        words = [w for w, (sign, _) in OPERATORS.items() if sign != file.operator]
        return next(word for word in words if word != task["wanted"])
    if task["kind"] == "set":
        return rng.choice([w for w in WORDS if w not in (task["wanted"], file.word)])
    return rng.choice([each for each in ("result", "helper", "other") if each != task["wanted"]])
