"""A recorded session as sources of evidence read it: who said what, which calls, which results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from proxy.conversation.images import shown, told_apart
from proxy.conversation.json_values import parsed_arguments
from proxy.conversation.messages import load_answer
from proxy.conversation.recorded import load_request
from proxy.records import FOLDER, Session, Turn

_ADDED = re.compile(r"<([a-z][\w-]*)>.*?</\1>", re.DOTALL)
"""What agents put around the user's words."""
COMMANDS = ("command", "cmd", "script", "code")
"""Arguments that hold a shell command."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of an answer, with its result."""

    turn: int
    name: str
    arguments: str
    result: str | None
    """None: the agent never sent one."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments; empty if they are not a JSON object."""
        found = parsed_arguments(self.arguments)
        return found if isinstance(found, dict) else {}

    @property
    def command(self) -> str:
        """The shell command that it runs; empty: none."""
        for name in COMMANDS:
            given = self.values.get(name)
            if isinstance(given, str):
                return given
            if isinstance(given, list):
                return " ".join(map(str, given))
        return ""


@dataclass(frozen=True, slots=True)
class Said:
    """What the user wrote, and after which turn; None: at the beginning."""

    text: str
    after: int | None


@dataclass(frozen=True)
class Seen:
    """Example: Seen(session, turns, now=time.time()).calls"""

    session: Session
    turns: Sequence[Turn]
    now: float

    @property
    def folder(self) -> str:
        """The agent's working folder; empty: not known."""
        return str(self.session.metadata.get(FOLDER, ""))

    @property
    def ended_at(self) -> float:
        return self.session.completed_at or self.session.expires_at

    @cached_property
    def calls(self) -> list[Call]:
        """The tool calls of all answers, in order."""
        results = {
            message.tool_call_id: shown(message.text)
            for turn in self.turns
            if (request := load_request(turn)) is not None
            for message in request.messages
            if message.role == "tool" and message.tool_call_id is not None
        }
        return [
            Call(turn.index, call.name, call.arguments, results.get(call.id))
            for turn in self.turns
            if turn.sampled and turn.answer
            for call in load_answer(turn.answer).tool_calls
        ]

    @cached_property
    def said(self) -> list[Said]:
        """The user's messages, in order, without what the agent added to them."""
        found = []
        for turn in self.turns:
            request = load_request(turn)
            for message in () if request is None else request.messages:
                text = _ADDED.sub(" ", told_apart(message.text)).strip()
                if message.role == "user" and text:
                    found.append(Said(text, None if request is None else request.after))
        return found
