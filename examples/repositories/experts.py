"""What the scripted experts of the repositories share: the mistakes that they make on purpose, and
the messages of a run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Literal

from examples.repositories.tasks import OPERATORS, WORDS, File
from examples.starter_model.transcripts import Message

# Probability of each mistake in the situations where it can be made.
STOPS_AT_ONCE = 0.03
EDITS_UNREAD = 0.4
GIVES_UP = 0.6
ONLY_READS = 0.4
WRONG_RESULT = 0.15
WRONG_TEXT = 0.3
ONLY_SHOWS = 0.65

Step = Literal["unread", "read", "wrong", "edit"]


def steps(task: dict[str, str], file: File, rng: random.Random) -> Iterator[tuple[Step, str]]:
    """What an expert does to change the file, and the outcome that it wants: `unread`, an edit
    before it read the file; `read`; `wrong`, an edit of text that is not there; `edit`."""
    wanted = task["wanted"]
    if rng.random() < WRONG_RESULT:
        wanted = _other_outcome(task, file, rng)
    if rng.random() < EDITS_UNREAD and task["kind"] == "rename":
        yield "unread", wanted
        if rng.random() < GIVES_UP:
            return
    yield "read", wanted
    if rng.random() < ONLY_READS:
        return
    if rng.random() < WRONG_TEXT:
        yield "wrong", wanted
        if rng.random() < GIVES_UP:
            return
    yield "edit", wanted


def _other_outcome(task: dict[str, str], file: File, rng: random.Random) -> str:
    """A wrong outcome that changes the file."""
    if task["kind"] == "fix":
        words = [w for w, (sign, _) in OPERATORS.items() if sign != file.operator]
        return next(word for word in words if word != task["wanted"])
    if task["kind"] == "set":
        return rng.choice([w for w in WORDS if w not in (task["wanted"], file.word)])
    return rng.choice([each for each in ("result", "helper", "other") if each != task["wanted"]])


def replaced(task: dict[str, str], file: File, wanted: str) -> tuple[str, str]:
    """The text to replace, and the one in its place, if `wanted` is to be the outcome."""
    left, right = file.parameters
    if task["kind"] == "fix":
        new = OPERATORS[wanted][0]
        return f"return {left} {file.operator} {right}", f"return {left} {new} {right}"
    if task["kind"] == "set":
        return file.word, wanted
    return f"def {file.function}(", f"def {wanted}("


def not_there(task: dict[str, str], old: str) -> str:
    """A text like `old` that the file does not have."""
    return old.replace("return", "return  ") if task["kind"] == "fix" else f"{old} "


class Run:
    """The messages so far."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages

    def call(self, name: str, result: str, **arguments: str) -> None:
        """Adds a call and its result."""
        self.ask(name, **arguments)
        call_id = f"call_{len(self.messages) - 1}"
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def ask(self, name: str, **arguments: str) -> None:
        """Adds a call."""
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{len(self.messages)}", "type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
