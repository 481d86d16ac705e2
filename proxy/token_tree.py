"""Which recorded tokens a request continues, and if none, where it forks and why.

A request is placed by its keys (see `conversation`): the deepest message that a recorded turn
answered with names the turn to continue. If the renderer can show that the new messages only
append to that turn's path, the request **extends** it. Everything else is rendered anew and
**forks** at the deepest token that it shares with a recorded path.

Invariant: for every placement, `path(parent)[:shared_tokens] + prompt_ids` is the whole prompt,
and `parent` is the turn that added the last shared token. A tree rebuilt from the stored turns
places every request as the tree that recorded them would have.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from proxy.conversation import (
    BODY,
    CHAIN,
    RAW,
    SYSTEM,
    TOOLS,
    Conversation,
    Message,
    load_answer,
    raw_key,
)
from proxy.errors import RequestError
from proxy.records import EMPTY_IDS, FinishReason, ForkCause, Ids, Turn, TurnStatus
from proxy.rendering.rendering import Rendering

QUOTED_TURNS = 64
"""How far back a summary is looked for in what was said: a fork must not cost the whole session."""
MIN_QUOTE_CHARS = 40
"""A new history that quotes this much of an earlier answer's longest line is a summary of it."""
FORK_CANDIDATES = 16
"""Paths compared token by token for a fork's deepest common point: the likeliest and latest."""


@dataclass(slots=True)
class Node:
    """What memory keeps of a turn: a few arrays, no text but a quote's beginning."""

    index: int
    parent: int | None
    shared_tokens: int
    prompt_ids: Ids
    request_key: bytes
    status: TurnStatus
    sampled_ids: Ids = field(default_factory=lambda: EMPTY_IDS)
    answer_key: bytes = b""
    quote: str = ""
    children: int = 0
    """Turns that go on from its answer; siblings share its prompt only."""
    truncated_at: int | None = None
    """The `max_tokens` that its answer ran into."""
    streamed: bool | None = None
    """Whether the agent asked for a stream; not known of a turn that another process began."""

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + len(self.prompt_ids)

    @property
    def path_tokens(self) -> int:
        return self.prompt_tokens + len(self.sampled_ids)


@dataclass(frozen=True, slots=True)
class Match:
    """How far the record knows a conversation."""

    answered: int
    """Index of the last message that is a recorded answer; -1 if none is."""
    node: int | None
    """The turn that gave that answer."""


@dataclass(frozen=True, slots=True)
class Placement:
    parent: int | None
    shared_tokens: int
    prompt_ids: Ids
    cause: ForkCause | None


class TokenTree:
    """The turns of one session. Not thread-safe: one event loop places and records."""

    def __init__(self, turns: Iterable[Turn] = (), *, follows: bool = False) -> None:
        """`follows`: the keys tell reasoning apart (a profile whose history is `follow`)."""
        self.follows = follows
        self.nodes: list[Node] = []
        self.sampled_tokens = 0
        self._by_answer: dict[bytes, int] = {}
        self._by_request: dict[bytes, list[int]] = {}
        self._by_body: dict[bytes, int] = {}
        self._raw_lengths: set[int] = set()
        for turn in turns:
            self.begin(turn)
            if turn.status is not TurnStatus.OPEN:
                self.commit(turn)

    def __len__(self) -> int:
        return len(self.nodes)

    def begin(self, turn: Turn) -> None:
        """Adds a turn whose intent is recorded. Turns come in order of index."""
        if turn.index != len(self.nodes):
            raise ValueError(f"turn {turn.index} after {len(self.nodes)} turns")
        node = Node(
            turn.index,
            turn.parent,
            turn.shared_tokens,
            turn.prompt_ids,
            turn.request_key,
            turn.status,
        )
        self.nodes.append(node)
        self._by_request.setdefault(turn.request_key[CHAIN], []).append(turn.index)
        self._by_body[turn.request_key[BODY]] = turn.index
        if turn.parent is not None:
            parent = self.nodes[turn.parent]
            parent.children += turn.shared_tokens > parent.prompt_tokens

    def knows(self, turn: Turn) -> bool:
        """Whether this very turn was committed here."""
        node = self.nodes[turn.index] if turn.index < len(self.nodes) else None
        if node is None or node.request_key != turn.request_key:
            return False
        return node.status is not TurnStatus.OPEN

    def answered(self, index: int) -> bool:
        return index < len(self.nodes) and bool(self.nodes[index].answer_key)

    def commit(self, turn: Turn) -> None:
        node = self.nodes[turn.index]
        self.sampled_tokens -= len(node.sampled_ids)  # of a tree that was read when it was stored
        node.status = turn.status
        node.sampled_ids = turn.sampled_ids
        node.answer_key = turn.answer_key
        if turn.finish_reason is FinishReason.LENGTH:
            node.truncated_at = turn.sampling.get("max_tokens")
        self.sampled_tokens += len(turn.sampled_ids)
        if turn.answer_key:
            self._by_answer[turn.answer_key[CHAIN]] = turn.index
            self._by_body[turn.answer_key[BODY]] = turn.index
            if turn.answer_key[SYSTEM] == RAW:
                self._raw_lengths.add(int.from_bytes(turn.answer_key[TOOLS], "little"))
        if turn.answer:
            lines = load_answer(turn.answer).text.splitlines()
            node.quote = max(lines, key=len, default="").strip()[: 2 * MIN_QUOTE_CHARS]

    def same_requests(self, request_key: bytes) -> list[Node]:
        """Turns that were asked the same, in order."""
        return [self.nodes[i] for i in self._by_request.get(request_key[CHAIN], ())]

    def prompt(self, parent: int | None, shared_tokens: int, prompt_ids: Ids) -> Ids:
        """The whole prompt of a turn or placement, `[T]`."""
        return np.concatenate([*self._spans(parent, shared_tokens), prompt_ids])

    def path(self, index: int) -> Ids:
        """A turn's whole path, its answer included, `[T]`."""
        spans = self._spans(index, self.nodes[index].path_tokens)
        return np.concatenate(spans) if spans else EMPTY_IDS

    def prompt_end(self, node: Node) -> Ids:
        """The last tokens of a turn's prompt: its own, or those of the turn it repeats."""
        while not len(node.prompt_ids) and node.parent is not None:
            node = self.nodes[node.parent]
        return node.prompt_ids

    def match(self, keys: list[bytes]) -> Match:
        for position in reversed(range(len(keys))):
            node = self._by_answer.get(keys[position][CHAIN])
            if node is not None:
                return Match(position, node)
        return Match(-1, None)

    def place(
        self, conversation: Conversation, keys: list[bytes], rendering: Rendering
    ) -> Placement:
        """Raises RequestError when the conversation cannot be rendered."""
        same = self.same_requests(keys[-1])
        if same:
            return self.sibling(same[-1])
        if conversation.raw is not None:
            return self._place_raw(conversation.raw, rendering)
        match = self.match(keys)
        if match.node is not None:
            extended = self._extend(conversation, match, rendering)
            if extended is not None:
                return extended
        return self._fork(conversation, keys, match, rendering)

    def sibling(self, node: Node) -> Placement:
        """One more answer to the very prompt of `node`."""
        shared = node.prompt_tokens
        return Placement(self._owner(node.index, shared), shared, EMPTY_IDS, ForkCause.SIBLING)

    def _extend(
        self, conversation: Conversation, match: Match, rendering: Rendering
    ) -> Placement | None:
        node = self.nodes[match.node or 0]
        new = conversation.messages[match.answered + 1 :]
        foreign = any(message.role == "assistant" for message in new)
        suffix = None
        if not foreign:
            calls = conversation.messages[match.answered].tool_calls
            suffix = rendering.bridge(
                self.prompt_end(node), node.sampled_ids, new, conversation.tools, calls
            )
        if suffix is None:
            last = node.sampled_ids[-1] if len(node.sampled_ids) else -1
            suffix = rendering.suffix_after(conversation, match.answered, int(last))
        if suffix is None:
            return None
        cause = ForkCause.FOREIGN_ASSISTANT if foreign else None
        if cause is None and node.children:
            cause = ForkCause.ROLLED_BACK
        return Placement(node.index, node.path_tokens, suffix, cause)

    def _place_raw(self, raw: str | list[int], rendering: Rendering) -> Placement:
        """A prompt without messages: it continues the longest recorded text that it begins with."""
        if isinstance(raw, str):
            for length in sorted((n for n in self._raw_lengths if n <= len(raw)), reverse=True):
                index = self._by_answer.get(raw_key(raw[:length])[CHAIN])
                if index is None:
                    continue
                node = self.nodes[index]
                spoken = rendering.before_stop(node.sampled_ids.tolist())
                if raw[:length].endswith(rendering.tokenizer.decode(spoken)):
                    suffix = np.array(rendering.tokenizer.encode(raw[length:]), np.int32)
                    shared = node.prompt_tokens + len(spoken)
                    cause = None if shared == node.path_tokens else ForkCause.EDITED
                    return Placement(index, shared, suffix, cause)
            ids = rendering.tokenizer.encode(raw, add_special_tokens=True)
        else:
            ids = raw
        prompt = np.array(ids, np.int32)
        parent, shared = self._deepest_common_point(prompt, Match(-1, None), [])
        whole = parent is not None and shared == self.nodes[parent].path_tokens
        cause = None if whole or not self.nodes else ForkCause.NEW_CONVERSATION
        return Placement(parent, shared, prompt[shared:], cause)

    def _fork(
        self, conversation: Conversation, keys: list[bytes], match: Match, rendering: Rendering
    ) -> Placement:
        if conversation.continues is not None:
            raise RequestError(
                "previous_response_id: this model's chat template cannot append to that response; "
                "send the whole input instead",
                param="previous_response_id",
            )
        prompt = rendering.full(conversation)
        if not self.nodes:
            return Placement(None, 0, prompt, None)
        cause = self._cause(conversation, keys, match)
        parent, shared = self._deepest_common_point(prompt, match, keys)
        return Placement(parent, shared, prompt[shared:], cause)

    def _deepest_common_point(
        self, prompt: Ids, match: Match, keys: list[bytes]
    ) -> tuple[int | None, int]:
        likely = [match.node] if match.node is not None else []
        for key in reversed(keys):
            likely += self._by_request.get(key[CHAIN], ())[-2:]
        recent = range(len(self.nodes) - 1, max(-1, len(self.nodes) - 1 - FORK_CANDIDATES), -1)
        best, best_shared = None, 0
        known: dict[int, int] = {}
        for index in dict.fromkeys([*likely[:FORK_CANDIDATES], *recent]):
            shared = self._common(index, prompt, known)
            if shared > best_shared:
                best, best_shared = index, shared
        return self._owner(best, best_shared), best_shared

    def _common(self, index: int, prompt: Ids, known: dict[int, int]) -> int:
        """How many tokens a turn's path and a prompt begin with in common; each turn's own are
        looked at once, its result is `known` from then on."""
        chain = []
        at: int | None = index
        while at is not None and at not in known:
            chain.append(at)
            at = self.nodes[at].parent
        shared = len(prompt) if at is None else known[at]
        for at in reversed(chain):
            node = self.nodes[at]
            if shared >= node.shared_tokens:
                shared = node.shared_tokens
                for own in (node.prompt_ids, node.sampled_ids):
                    same = common_prefix(own, prompt[shared:])
                    shared += same
                    if same < len(own):
                        break
            known[at] = shared
        return shared

    def _owner(self, index: int | None, shared: int) -> int | None:
        """The turn on the path of `index` that added its token `shared - 1`."""
        while index is not None and self.nodes[index].shared_tokens >= shared:
            index = self.nodes[index].parent
        return index

    def _cause(self, conversation: Conversation, keys: list[bytes], match: Match) -> ForkCause:
        messages = conversation.messages
        known = next((i for i in reversed(range(len(keys))) if self._knows(keys[i])), -1)
        if known >= 0 and known + 1 < len(messages):
            asked = self.same_requests(keys[known])
            return self._cause_after(messages[known + 1], asked, match)
        if known >= 0:  # every message is known, and yet it could not be joined
            return ForkCause.UNPROVABLE_BRIDGE
        for position in reversed(range(len(keys))):
            key = keys[position]
            other = self._by_body.get(key[BODY])
            if other is not None and key[BODY] != bytes(16):
                return self._cause_beside(self.nodes[other], key, messages[position + 1 :], match)
        if self._is_quoted(messages):
            return ForkCause.COMPACTION
        return ForkCause.NEW_CONVERSATION

    def _cause_beside(
        self, other: Node, key: bytes, following: list[Message], match: Match
    ) -> ForkCause:
        """Why a conversation forks whose messages, but not whose whole key, `other` has too."""
        if other.request_key[SYSTEM] != key[SYSTEM]:
            return ForkCause.SYSTEM_CHANGED
        if other.request_key[TOOLS] != key[TOOLS]:
            return ForkCause.TOOLS_CHANGED
        # The same request but for a call that was forced.
        return self._cause_after(following[0], [other], match) if following else ForkCause.SIBLING

    def _cause_after(self, message: Message, asked: list[Node], match: Match) -> ForkCause:
        """Why `message` is not what the record has after the last message that it knows."""
        if message.role != "assistant":
            node = None if match.node is None else self.nodes[match.node]
            if asked:
                return ForkCause.ROLLED_BACK
            if node is not None and node.children:
                return ForkCause.EDITED
            return ForkCause.UNPROVABLE_BRIDGE
        if not asked:
            return ForkCause.FOREIGN_ASSISTANT
        if self.follows and not message.reasoning:
            return ForkCause.REASONING_DROPPED
        return ForkCause.TOOL_ARGUMENTS if message.tool_calls else ForkCause.EDITED

    def _knows(self, key: bytes) -> bool:
        return key[CHAIN] in self._by_answer or key[CHAIN] in self._by_request

    def _is_quoted(self, messages: list[Message]) -> bool:
        recent = self.nodes[-QUOTED_TURNS:]
        quotes = {node.quote for node in recent if len(node.quote) >= MIN_QUOTE_CHARS}
        texts = [message.text for message in messages if message.role != "assistant"]
        return any(quote in text for quote in quotes for text in texts)

    def _spans(self, index: int | None, length: int) -> list[Ids]:
        """The arrays whose concatenation is the first `length` tokens of a turn's path."""
        spans: list[Ids] = []
        while index is not None and length > 0:
            node = self.nodes[index]
            if length > node.prompt_tokens:
                spans.append(node.sampled_ids[: length - node.prompt_tokens])
                length = node.prompt_tokens
            if length > node.shared_tokens:
                spans.append(node.prompt_ids[: length - node.shared_tokens])
                length = node.shared_tokens
            index = node.parent
        spans.reverse()
        return spans


def common_prefix(left: Ids, right: Ids) -> int:
    """How many ids two arrays begin with in common."""
    size = min(len(left), len(right))
    if size == 0:
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
