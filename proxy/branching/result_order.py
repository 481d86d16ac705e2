"""Results of calls at once, whose order depends on which one was done first.

Agents that run the calls of an answer at the same time, such as sub-agents, may send the results as
they arrive. Two requests are compared with the results in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from proxy.conversation.messages import Message


def in_call_order(messages: Sequence[Message], calls: Sequence[str] = ()) -> list[Message]:
    """The messages, with the results of each answer in the order of its calls. `calls` are the ids
    of the calls before the first message."""
    ordered: list[Message] = []
    for is_result, found in groupby(messages, key=lambda message: message.role == "tool"):
        group = list(found)
        if is_result:
            place = {call: at for at, call in reversed([*enumerate(calls)])}
            group.sort(key=lambda message: place.get(message.tool_call_id or "", len(place)))
        elif group[-1].role == "assistant":
            calls = [call.id for call in group[-1].tool_calls]
        ordered += group
    return ordered


def settled(messages: Sequence[Message], ordered: Sequence[Message]) -> Iterator[bool]:
    """For each message, whether both orders have the same messages up to there."""
    open_ids: set[int] = set()
    for one, other in zip(messages, ordered, strict=True):
        open_ids ^= {id(one)} ^ {id(other)}
        yield not open_ids


def result_places(messages: Sequence[Message], ordered: Sequence[Message]) -> str:
    """The places of the results in the order of the calls; "1 0" for two that are exchanged."""
    places = {id(message): at for at, message in enumerate(ordered)}
    first = next((at for at, message in enumerate(messages) if message.role == "tool"), 0)
    return " ".join(str(places[id(m)] - first) for m in messages if m.role == "tool")
