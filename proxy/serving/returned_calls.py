"""Puts the recorded calls in the place of those that an agent's client has tidied.

Calls are looked up by their id, so that a history is the recorded one again before it is keyed:
what the model sees are the tokens that it sampled. Invariant: a call is only replaced by the
recorded call of the same id that `conversation.tidied` finds to be the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.conversation.messages import Conversation, Message, ToolCall
from proxy.conversation.tidied import tidied
from proxy.settings.profiles import AgentProfile

KEPT_BYTES = 2**18
"""Arguments of tidied calls that a session keeps in memory; others are read again."""
CALL_BYTES = 300
"""Memory per entry besides the arguments."""

MAX_OTHERS = 5000
"""Calls of a session that are remembered as different from the recorded ones; no more are looked
up."""

Form = tuple[str, str, int]
"""A call as the agent sent it: id, name, hash of the arguments."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recorded call, and what the agent's client had changed in it."""

    turn: int
    call: ToolCall
    changes: tuple[str, ...]


@dataclass(slots=True)
class ReturnedCalls:
    """What a session knows about the calls that its agent has sent back in another form."""

    _known: OrderedDict[Form, Recovered] = field(default_factory=OrderedDict)
    _others: set[int] = field(default_factory=set)
    """Hashes of the forms that are not tidied ones."""
    _size: int = 0

    def recover(self, conversation: Conversation) -> list[Recovered]:
        """Replaces the calls whose recorded form is known. Returns those that were tidied."""
        if not self._known:
            return []
        found = []
        for call in _calls(conversation.messages):
            recovered = self._known.get(_form(call))
            if recovered is not None:
                _replace(call, recovered)
                found.append(recovered)
        return found

    def unknown(self, messages: Sequence[Message]) -> list[ToolCall]:
        """The calls in `messages` that are to be looked up in the record."""
        if len(self._others) >= MAX_OTHERS:
            return []
        return [
            call
            for call in _calls(messages)
            if (form := _form(call)) not in self._known and hash(form) not in self._others
        ]

    def compare(
        self,
        call: ToolCall,
        recorded: Sequence[tuple[int, ToolCall]],
        tools: list[dict[str, Any]],
        profile: AgentProfile,
    ) -> Recovered | None:
        """Replaces `call` if it is one of the recorded calls of the same id, which come with their
        turns, and was tidied; remembers the result."""
        schema = _schema(tools, call.name)
        same = []
        for turn, each in recorded:
            changes = tidied(
                call,
                each,
                schema or _schema(tools, each.name),
                rewrites=profile.rewrites,
                stand_ins=profile.stand_ins,
            )
            if changes is not None:
                same.append(Recovered(turn, each, changes))
        distinct = {(each.call.name, each.call.arguments) for each in same}
        if len(distinct) == 1 and same[-1].changes:
            self._keep(_form(call), same[-1])
            _replace(call, same[-1])
            return same[-1]
        self._others.add(hash(_form(call)))
        return None

    def _keep(self, form: Form, recovered: Recovered) -> None:
        self._known[form] = recovered
        self._size += _bytes(recovered)
        while self._size > KEPT_BYTES and len(self._known) > 1:
            self._size -= _bytes(self._known.popitem(last=False)[1])


def _calls(messages: Sequence[Message]) -> Iterator[ToolCall]:
    for message in messages:
        if message.role == "assistant":
            yield from message.tool_calls


def _replace(call: ToolCall, recovered: Recovered) -> None:
    call.name, call.arguments = recovered.call.name, recovered.call.arguments


def _form(call: ToolCall) -> Form:
    return call.id, call.name, hash(call.arguments)


def _bytes(recovered: Recovered) -> int:
    return CALL_BYTES + len(recovered.call.arguments)


def _schema(tools: list[dict[str, Any]], name: str) -> dict[str, Any]:
    functions = (tool["function"] for tool in tools)
    schema = next((each.get("parameters") for each in functions if each.get("name") == name), None)
    return schema if isinstance(schema, dict) else {}
