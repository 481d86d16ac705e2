"""The recorded turns with which a branch begins, and which of them a request asks for.

A request is looked up by a chain of digests, one per message, of what is left of the message when
the tolerated differences are masked (`tolerance`). The longest recorded beginning of the request is
then replaced by the recorded messages. Invariant: everything after this step sees the recorded
messages, so that a request that was recorded has the recorded key (`conversation.message_keys`),
and a call that goes on after the recording continues the recorded ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import orjson
from msgspec import structs
from msgspec.structs import replace

from proxy.branching.divergence import RequestDifference, difference, message_text
from proxy.branching.result_order import in_call_order, result_places, settled
from proxy.branching.tolerance import Tolerance, Tolerated
from proxy.conversation.message_keys import message_digest
from proxy.conversation.messages import Conversation, Message, load_answer
from proxy.conversation.recorded import RecordedRequest, load_request
from proxy.records import Turn

ORDER = "order"
"""The name under which another order of results is reported."""
MAX_TOLERATED = 20
"""Tolerated differences that are recorded per request."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """How much of a request is recorded."""

    conversation: Conversation
    """The request with recorded messages in the place of its own."""
    turn: int | None
    """The turn whose request, or request and answer, begins like this one; None if nothing was
    recognised."""
    messages: int
    """Number of leading messages that are recorded."""
    answered: int | None
    """The turn of the last recorded answer among them."""
    complete: bool
    """Whether the whole request is recorded."""
    tolerated: list[Tolerated] = field(default_factory=list)
    """In the messages that `turn` added."""


@dataclass(slots=True)
class _Asked:
    """One turn: its request without the messages before `after`'s answer, and digests."""

    request: RecordedRequest
    before: int
    """Number of messages before those of the request."""
    after: int | None
    answer: Message | None
    ends: tuple[bytes, ...] = ()
    """The chain up to the answer; the second one is that of an agent that drops the text of
    answers with calls."""
    calls: list[str] = field(default_factory=list)
    """Ids of the last answer's calls."""


@dataclass(frozen=True, slots=True)
class _Place:
    turn: int
    messages: int


class RecordedPrefix:
    """The first turns of a branch. It does not change."""

    def __init__(
        self, turns: Sequence[Turn], tolerance: Tolerance, *, with_reasoning: bool
    ) -> None:
        """`with_reasoning`: whether reasoning is compared (a profile with `history: follow`)."""
        self._tolerance = tolerance
        self.with_reasoning = with_reasoning
        self._turns: list[_Asked | None] = []
        self._known: dict[bytes, _Place] = {}
        self._digests: dict[bytes, bytes] = {}
        for turn in turns:
            self._turns.append(self._read(turn))

    def __len__(self) -> int:
        return len(self._turns)

    def after(self, turn: int) -> int | None:
        """The turn whose answer the request of `turn` continues; None: it begins a conversation,
        or its request was not recorded."""
        asked = self._turns[turn]
        return None if asked is None else asked.after

    def recognise(self, conversation: Conversation) -> Recognised:
        """Finds the longest beginning of the request that is recorded."""
        messages = conversation.messages
        if conversation.raw is not None:
            return Recognised(conversation, None, 0, None, complete=False)
        if conversation.continues is not None:
            return self._recognise_after(conversation, conversation.continues)
        found, chain = None, self._tools(conversation)
        calls: list[str] = []
        ordered = in_call_order(messages)
        for message, same in zip(ordered, settled(messages, ordered), strict=True):
            chain = self._then(chain, message, calls)
            found = self._known.get(chain, found) if same else found
            if message.role == "assistant":
                calls = [call.id for call in message.tool_calls]
        if found is None:
            return Recognised(conversation, None, 0, None, complete=False)
        recorded = self.conversation(found.turn)
        head = recorded.messages[: found.messages]
        return Recognised(
            replace(
                conversation,
                messages=[*head, *messages[found.messages :]],
                tools=recorded.tools,
            ),
            found.turn,
            found.messages,
            self._answered(found),
            complete=found.messages == len(messages),
            tolerated=self._tolerated(found, recorded, conversation),
        )

    def conversation(self, turn: int) -> Conversation:
        """The recorded conversation up to and including the answer of `turn`."""
        parts: list[list[Message]] = []
        at: int | None = turn
        tools = []
        while at is not None and (asked := self._turns[at]) is not None:
            parts.append([*asked.request.messages, *([asked.answer] if asked.answer else [])])
            at, tools = asked.after, asked.request.tools
        return Conversation([m for part in reversed(parts) for m in part], tools)

    def request(self, turn: int) -> Conversation | None:
        """The recorded request of `turn`; None if it has no messages."""
        asked = self._turns[turn]
        if asked is None:
            return None
        whole = self.conversation(turn)
        return replace(whole, messages=whole.messages[: self._size(asked)])

    def divergence(self, turn: int, conversation: Conversation) -> RequestDifference:
        """How a request differs from the recorded one of `turn`."""
        recorded = self.request(turn)
        if recorded is None or conversation.raw is not None:
            return RequestDifference(
                turn, None, "the prompt without messages is not the recorded one", ""
            )
        same = self._tolerance.masked
        if conversation.continues is None and same(_tools_text(recorded)) != same(
            _tools_text(conversation)
        ):
            return difference(turn, None, _tools_text(recorded), _tools_text(conversation))
        known, calls = in_call_order(recorded.messages), list[str]()
        if conversation.continues is not None:
            known = known[len(known) - len(conversation.messages) :]
            after = self._turns[conversation.continues]
            calls = after.calls if after else []
        seen = in_call_order(conversation.messages, calls)
        for at, (one, other) in enumerate(zip(known, seen, strict=False)):
            if same(message_text(one)) != same(message_text(other)):
                return difference(turn, at, message_text(one), message_text(other))
        at = min(len(known), len(seen))
        more = [
            message_text(messages[at]) if at < len(messages) else "" for messages in (known, seen)
        ]
        return difference(turn, at, *more)

    def _recognise_after(self, conversation: Conversation, index: int) -> Recognised:
        """A request that names the answer that it continues (`previous_response_id`)."""
        asked = self._turns[index] if index < len(self._turns) else None
        if asked is None or not asked.ends:
            return Recognised(conversation, None, 0, None, complete=False)
        chain, found = asked.ends[0], None
        ordered = in_call_order(conversation.messages, asked.calls)
        for message, same in zip(ordered, settled(conversation.messages, ordered), strict=True):
            chain = self._then(chain, message, asked.calls)
            found = self._known.get(chain, found) if same else found
        before = self._size(asked) + 1
        if found is None:
            return Recognised(conversation, index, 0, index, complete=False)
        new = self.conversation(found.turn).messages[before : found.messages]
        rest = conversation.messages[len(new) :]
        return Recognised(
            replace(conversation, messages=[*new, *rest]),
            found.turn,
            len(new),
            index,
            complete=not rest,
            tolerated=self._all_differences(
                new, conversation.messages[: len(new)], slice(None), asked.calls
            ),
        )

    def _read(self, turn: Turn) -> _Asked | None:
        request = load_request(turn)
        if request is None:
            return None
        answer = load_answer(turn.answer) if turn.answer else None
        if request.same_as is not None:
            first = self._turns[request.same_as]
            if first is None:
                return None
            asked = _Asked(first.request, first.before, first.after, answer)
        else:
            previous = None if request.after is None else self._turns[request.after]
            before = 0 if previous is None else self._size(previous) + 1
            asked = _Asked(request, before, request.after, answer)
        self._remember(turn.index, asked)
        return asked

    def _remember(self, index: int, asked: _Asked) -> None:
        previous = None if asked.after is None else self._turns[asked.after]
        if previous is None:
            calls: list[str] = []
            chains: tuple[bytes, ...] = (self._tools(Conversation([], asked.request.tools)),)
        else:
            calls, chains = previous.calls, previous.ends
        messages = asked.request.messages
        ordered = in_call_order(messages, calls)
        same = settled(messages, ordered)
        for at, message in enumerate(ordered, asked.before + 1):
            chains = tuple(self._then(chain, message, calls) for chain in chains)
            if next(same):
                self._know(chains, _Place(index, at))
            if message.role == "assistant":
                calls = [call.id for call in message.tool_calls]
        if asked.answer is not None:
            bare = structs.replace(asked.answer, text="", reasoning=None)
            said = bare if asked.answer.tool_calls else asked.answer
            asked.calls = [call.id for call in asked.answer.tool_calls]
            asked.ends = (
                self._then(chains[0], asked.answer, calls),
                self._then(chains[-1], said, calls),
            )
            self._know(asked.ends, _Place(index, self._size(asked) + 1))

    def _know(self, chains: Sequence[bytes], place: _Place) -> None:
        for chain in chains:
            self._known.setdefault(chain, place)

    def _size(self, asked: _Asked) -> int:
        """Number of messages of the whole request."""
        return asked.before + len(asked.request.messages)

    def _answered(self, place: _Place) -> int | None:
        asked = self._turns[place.turn]
        assert asked is not None
        return place.turn if place.messages > self._size(asked) else asked.after

    def _tools(self, conversation: Conversation) -> bytes:
        tools = self._tolerance.masked(_tools_text(conversation))
        return blake2b(tools.encode(), digest_size=16).digest()

    def _then(self, chain: bytes, message: Message, calls: list[str]) -> bytes:
        exact = message_digest(message, calls, with_reasoning=self.with_reasoning)
        digest = self._digests.get(exact)
        if digest is None:  # an agent sends its history again with every call
            text = self._tolerance.masked(message.text)
            masked = structs.replace(message, text=text)
            digest = message_digest(masked, calls, with_reasoning=self.with_reasoning)
            self._digests[exact] = digest
        return blake2b(chain + digest, digest_size=16).digest()

    def _tolerated(
        self, place: _Place, recorded: Conversation, conversation: Conversation
    ) -> list[Tolerated]:
        asked = self._turns[place.turn]
        assert asked is not None
        own = slice(asked.before, place.messages)
        found = self._all_differences(recorded.messages, conversation.messages, own)
        if asked.after is None:
            one, other = _tools_text(recorded), _tools_text(conversation)
            found += self._tolerance.differences(one, other)
        return found[:MAX_TOLERATED]

    def _all_differences(
        self,
        recorded: Sequence[Message],
        seen: Sequence[Message],
        own: slice,
        calls: Sequence[str] = (),
    ) -> list[Tolerated]:
        """Of the messages `own`; `calls`: see `in_call_order`."""
        ordered = [in_call_order(messages, calls) for messages in (recorded, seen)]
        pairs = zip(*(messages[own] for messages in ordered), strict=False)
        places = [
            result_places(messages[own], same[own])
            for messages, same in zip((recorded, seen), ordered, strict=True)
        ]
        moved = [Tolerated(ORDER, *places)] if places[0] != places[1] else []
        differences = (
            difference
            for one, other in pairs
            if one.role != "assistant"
            for difference in self._tolerance.differences(one.text, other.text)
        )
        return [*moved, *differences][:MAX_TOLERATED]


def _tools_text(conversation: Conversation) -> str:
    return orjson.dumps(conversation.tools, option=orjson.OPT_SORT_KEYS).decode()
