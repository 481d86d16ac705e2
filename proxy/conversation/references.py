"""Parts of recorded answers that an agent refers to by id instead of sending them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.conversation.messages import Conversation, Message, normalised
from proxy.errors import RequestError


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Example: AnswerPart("fc_3_0_call_3f…", turn=3, part="call", call=0, call_id="call_3f…")"""

    item_id: str
    """The id that the agent sent."""
    turn: int
    part: Literal["reasoning", "text", "call"]
    call: int = 0
    """Index of the tool call in the answer."""
    call_id: str = ""


@dataclass(slots=True)
class ReferringConversation:
    """A conversation that refers to recorded answers, which must be resolved before it is used."""

    conversation: Conversation
    """It has no messages before `resolve`."""
    items: list[Message | AnswerPart]

    @property
    def turns(self) -> set[int]:
        """Indexes of the turns whose answers are needed."""
        return {item.turn for item in self.items if isinstance(item, AnswerPart)}

    def resolve(self, answers: Mapping[int, Message]) -> None:
        """Fills the conversation's messages. `answers` holds recorded answers by turn.

        Raises RequestError (404) for a part that is not in the record.
        """
        messages: list[Message] = []
        seen = set[tuple[int, str, int]]()
        for item in self.items:
            if not isinstance(item, AnswerPart):
                messages.append(item)
                continue
            part = _part_of(answers.get(item.turn), item)
            # Text on both sides of a call is two items of a stream, and one part of the answer.
            if (key := (item.turn, item.part, item.call)) not in seen:
                messages.append(part)
            seen.add(key)
        self.conversation.messages = normalised(messages)


def unknown_item(item_id: str) -> RequestError:
    """The error for an id that does not belong to the session."""
    return RequestError(
        f"input: item {item_id[:80]!r} is not in this session's record; send the item itself "
        "instead of an item_reference",
        param="input",
        status=404,
    )


def _part_of(answer: Message | None, part: AnswerPart) -> Message:
    if answer is None:
        raise unknown_item(part.item_id)
    if part.part == "reasoning" and answer.reasoning:
        return Message("assistant", reasoning=answer.reasoning)
    if part.part == "text":
        return Message("assistant", answer.text)
    if part.part == "call" and part.call < len(answer.tool_calls):
        call = answer.tool_calls[part.call]
        if call.id == part.call_id:
            return Message("assistant", tool_calls=[call])
    raise unknown_item(part.item_id)
