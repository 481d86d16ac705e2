"""Finds the recorded tokens that a request continues, or else where and why it forks.

A request is placed by its keys (see `conversation.message_keys`): the last message that is a
recorded answer determines the turn to continue. If the renderer can prove that the new messages
only append to that turn's path, the request **extends** it. Every other request is rendered as a
whole and **forks** after the longest prefix that it shares with a recorded path.

Invariant: for every placement, `path(parent)[:shared_tokens] + prompt_ids` is the whole prompt,
and `parent` is the turn that added the last shared token. A tree that is rebuilt from the stored
turns places every request like the tree that recorded them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec import structs

from proxy.conversation.images import named
from proxy.conversation.message_keys import ConversationKey, Key, RawKey, key_from_stored, raw_key
from proxy.conversation.messages import Conversation, Message, load_answer
from proxy.conversation.recorded import dump_request, dump_same_request
from proxy.errors import RequestError
from proxy.records import EMPTY_IDS, FinishReason, ForkCause, Ids, ImageSpan, Turn, TurnStatus
from proxy.records.images import found_images, moved, uncut, within
from proxy.rendering.rendering import Rendering
from proxy.token_tree.fork_cause import QUOTED_TURNS, AnswerMarks, cause_of, is_quoted
from proxy.token_tree.paths import LastPrompt, common_prefix, path, prefix, prefix_images

FORK_CANDIDATES = 16
"""Number of paths that are compared with a prompt token by token to find where it forks: the most
likely ones and the latest ones."""

MAX_SAME_IDS = 8
"""Turns that are looked at for a call whose id the model wrote, and may have written again."""


class Node(msgspec.Struct, gc=False):
    """A turn in memory: arrays and digests."""

    index: int
    parent: int | None
    shared_tokens: int
    prompt_ids: Ids
    request_key: Key
    status: TurnStatus
    sampled_ids: Ids = EMPTY_IDS
    answer_key: Key | None = None
    """None until something was sampled."""
    marks: AnswerMarks | None = None
    """Summary of the answer; None without an answer."""
    children: int = 0
    """Number of turns that continue its answer. (Siblings share only its prompt.)"""
    truncated_at: int | None = None
    """The `max_tokens` at which the answer was truncated."""
    routed: int = 0
    """Number of tokens of the path, from its start, whose routed experts are recorded."""
    images: tuple[ImageSpan, ...] = ()
    """Those in `prompt_ids`."""
    sampled: bool = False
    """Whether it counts as a turn of the session, that is, was not cut before its first token."""

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + len(self.prompt_ids)

    @property
    def path_tokens(self) -> int:
        return self.prompt_tokens + len(self.sampled_ids)


class Match(msgspec.Struct, frozen=True):
    """The last recorded answer in a conversation."""

    answered: int
    """Index of the last message that is a recorded answer; -1 if there is none."""
    node: int | None
    """The turn of that answer."""


class Placement(msgspec.Struct, frozen=True):
    """A request's place in the tree, and the tokens that it adds there."""

    parent: int | None
    shared_tokens: int
    prompt_ids: Ids
    prompt: Ids
    """The whole prompt, `[shared_tokens + len(prompt_ids)]`."""
    cause: ForkCause | None
    images: tuple[ImageSpan, ...] = ()
    """Those of the whole prompt, with offsets in it."""

    @property
    def own_images(self) -> tuple[ImageSpan, ...]:
        """Those in `prompt_ids`."""
        return within(self.images, self.shared_tokens, len(self.prompt))

    def followed_by(self, ids: Ids) -> Placement:
        """The placement of the same request with `ids` at the end of its prompt."""
        if not len(ids):
            return self
        own, prompt = (np.concatenate([before, ids]) for before in (self.prompt_ids, self.prompt))
        return structs.replace(self, prompt_ids=own, prompt=prompt)


class TokenTree:
    """The turns of one session. Not thread-safe: one task at a time places and records."""

    def __init__(self, turns: Iterable[Turn] = (), *, follows: bool = False) -> None:
        """With `follows`, keys include the reasoning (a profile with `history: follow`)."""
        self.follows = follows
        self.nodes: list[Node] = []
        self.quotes: list[str] = []
        """Of each turn the answer's `AnswerMarks.quote`; empty if it has none."""
        self.has_images = False
        """Whether any turn has an image."""
        self.sampled_tokens = 0
        self.sampled_turns = 0
        self._by_answer: dict[bytes, int] = {}
        self._by_calls: dict[bytes, int | None] = {}
        """Answers with calls under the key that they have without their text; None for two answers
        that differ only in their text. Empty with `follows`."""
        self._by_request: dict[bytes, list[int]] = {}
        self._by_call_id: dict[str, list[int]] = {}
        self._by_body: dict[bytes, int] = {}
        self._raw_lengths: set[int] = set()
        self._last_prompt = LastPrompt()
        for turn in turns:
            self.begin(turn)
            if turn.status is not TurnStatus.OPEN:
                self.commit(turn)

    def __len__(self) -> int:
        return len(self.nodes)

    def begin(self, turn: Turn, request_key: Key | None = None) -> None:
        """Adds a turn whose intent is recorded. Turns must be added in order of index.

        `request_key` is the turn's, if the caller has it in this form.
        """
        if turn.index != len(self.nodes):
            raise ValueError(f"turn {turn.index} does not follow {len(self.nodes)} turns")
        node = Node(
            turn.index,
            turn.parent,
            turn.shared_tokens,
            turn.prompt_ids,
            request_key or key_from_stored(turn.request_key),
            turn.status,
            routed=self.routed(turn.parent, turn.shared_tokens),
            images=turn.images,
        )
        self.has_images = self.has_images or bool(turn.images)
        self.nodes.append(node)
        self.quotes.append("")
        self._by_request.setdefault(node.request_key.chain, []).append(turn.index)
        self._remember_body(node.request_key, turn.index)
        if turn.parent is not None:
            parent = self.nodes[turn.parent]
            parent.children += turn.shared_tokens > parent.prompt_tokens

    def knows(self, turn: Turn) -> bool:
        """Whether this turn was committed to this tree."""
        node = self.nodes[turn.index] if turn.index < len(self.nodes) else None
        if node is None or node.request_key != key_from_stored(turn.request_key):
            return False
        return node.status is not TurnStatus.OPEN

    def answered(self, index: int) -> bool:
        """Whether the turn exists and has an answer."""
        return index < len(self.nodes) and self.nodes[index].answer_key is not None

    def commit(self, turn: Turn, answer: Message | None = None, key: Key | None = None) -> None:
        """Adds the answer of a turn that was begun, or replaces it.

        `answer` and `key` are the turn's, if the caller has them in this form.
        """
        node = self.nodes[turn.index]
        self.sampled_tokens += len(turn.sampled_ids) - len(node.sampled_ids)
        self.sampled_turns -= node.sampled
        node.status = turn.status
        node.sampled_ids = turn.sampled_ids
        if turn.routed_experts is not None:
            node.routed = node.path_tokens - 1
        node.sampled = turn.status is not TurnStatus.CUT or len(turn.sampled_ids) > 0
        self.sampled_turns += node.sampled
        if turn.finish_reason is FinishReason.LENGTH:
            node.truncated_at = turn.sampling.get("max_tokens")
        if turn.answer_key:
            node.answer_key = key or key_from_stored(turn.answer_key)
            self._by_answer[node.answer_key.chain] = turn.index
            self._remember_body(node.answer_key, turn.index)
            if isinstance(node.answer_key, RawKey):
                self._raw_lengths.add(node.answer_key.length)
        if turn.answer:
            answer = answer or load_answer(turn.answer)
            node.marks = AnswerMarks.of(answer)
            self.quotes[turn.index] = node.marks.quote
            self._remember_calls(node, answer)
            for call in answer.tool_calls:
                turns = self._by_call_id.setdefault(call.id, [])
                if turn.index not in turns:
                    turns.append(turn.index)

    def _remember_calls(self, node: Node, answer: Message) -> None:
        """Some agents drop the text of an answer that has calls. The prompt keeps it."""
        asked = node.request_key
        if self.follows or not answer.tool_calls or not answer.text or isinstance(asked, RawKey):
            return
        if asked.answered(answer) == node.answer_key:
            chain = asked.answered(structs.replace(answer, text="", reasoning=None)).chain
            other = self._by_calls.get(chain, node.index)
            same = other is not None and self.nodes[other].answer_key == node.answer_key
            self._by_calls[chain] = node.index if same else None

    @property
    def has_calls(self) -> bool:
        """Whether a recorded answer has a call."""
        return bool(self._by_call_id)

    def turns_of_call(self, call_id: str) -> list[int]:
        """The latest turns whose answer has a call with this id, of which there is one, unless
        the model wrote the id."""
        return self._by_call_id.get(call_id, [])[-MAX_SAME_IDS:]

    def _remember_body(self, key: Key, index: int) -> None:
        if isinstance(key, ConversationKey):
            self._by_body[key.body] = index

    def same_body(self, key: ConversationKey) -> Node | None:
        """The last turn whose messages, without the leading system messages, are those of `key`."""
        index = self._by_body.get(key.body) if key.has_body else None
        return None if index is None else self.nodes[index]

    def same_requests(self, request_key: Key) -> list[Node]:
        """The turns with this request key, in order."""
        return [self.nodes[i] for i in self._by_request.get(request_key.chain, ())]

    def prompt(self, parent: int | None, shared_tokens: int, prompt_ids: Ids) -> Ids:
        """The whole prompt of a turn or placement, `[T]`."""
        return prefix(self.nodes, parent, shared_tokens, prompt_ids)

    def images(self, parent: int | None, shared_tokens: int) -> tuple[ImageSpan, ...]:
        """The images in the first `shared_tokens` tokens of a turn's path."""
        if not self.has_images:
            return ()
        return prefix_images(self.nodes, parent, shared_tokens)

    def prompt_images(self, turn: Turn) -> tuple[ImageSpan, ...]:
        """The images of a turn's whole prompt."""
        before = self.images(turn.parent, turn.shared_tokens)
        return (*before, *moved(turn.images, turn.shared_tokens))

    def path(self, index: int) -> Ids:
        """A turn's whole path including its answer, `[T]`."""
        return path(self.nodes, index)

    def routed(self, parent: int | None, shared_tokens: int) -> int:
        """Number of tokens of a prompt, from its start, whose routed experts are recorded."""
        return 0 if parent is None else min(self.nodes[parent].routed, shared_tokens)

    def prompt_end(self, node: Node) -> Ids:
        """The last tokens of a turn's prompt: its own, or those of the turn that it resamples."""
        while not len(node.prompt_ids) and node.parent is not None:
            node = self.nodes[node.parent]
        return node.prompt_ids

    def match(self, keys: Sequence[Key]) -> Match:
        """The last message of a conversation that is a recorded answer."""
        for position in reversed(range(len(keys))):
            chain = keys[position].chain
            node = self._by_answer.get(chain, self._by_calls.get(chain))
            if node is not None:
                return Match(position, node)
        return Match(-1, None)

    def new_messages(self, conversation: Conversation, keys: Sequence[Key]) -> bytes:
        """What a request adds to the conversation of the turn that it continues, to be recorded."""
        if same := self._by_request.get(keys[-1].chain):
            return dump_same_request(same[-1])
        match = self.match(keys)
        return dump_request(conversation, match.answered, match.node)

    def place(
        self, conversation: Conversation, keys: Sequence[Key], rendering: Rendering
    ) -> Placement:
        """Places a request. Raises RequestError if the conversation cannot be rendered."""
        if same := self._by_request.get(keys[-1].chain):
            return self.sibling(self.nodes[same[-1]])
        if conversation.raw is not None:
            return self._place_raw(conversation.raw, rendering)
        match = self.match(keys)
        placed = None
        if match.node is not None:
            placed = self._extend(conversation, keys, match, rendering)
        if placed is None:
            placed = self._fork(conversation, keys, match, rendering)
        if not conversation.images and not self.has_images:
            return placed
        before = self.images(placed.parent, placed.shared_tokens)
        own = found_images(placed.prompt_ids, conversation.images.values())
        images = (*before, *moved(own, placed.shared_tokens))
        return structs.replace(placed, images=images)

    def sibling(self, node: Node) -> Placement:
        """The placement of another answer to the prompt of `node`."""
        shared = node.prompt_tokens
        parent = self.owner(node.index, shared)
        prompt, images = prefix(self.nodes, parent, shared), self.images(parent, shared)
        return Placement(parent, shared, EMPTY_IDS, prompt, ForkCause.SIBLING, images)

    def _extend(
        self, conversation: Conversation, keys: Sequence[Key], match: Match, rendering: Rendering
    ) -> Placement | None:
        node = self.nodes[match.node or 0]
        new = conversation.messages[match.answered + 1 :]
        foreign = any(message.role == "assistant" for message in new)
        suffix = None
        if not foreign:
            calls = conversation.messages[match.answered].tool_calls
            suffix = rendering.bridge(
                *(self.prompt_end(node), node.sampled_ids, new, conversation.tools, calls),
                conversation.images,
            )
        if suffix is None:
            last = node.sampled_ids[-1] if len(node.sampled_ids) else -1
            suffix = rendering.suffix_after(conversation, match.answered, int(last))
        if suffix is None:
            return None
        cause = self._foreign_cause(conversation.messages, keys, match) if foreign else None
        if cause is None and node.children:
            changes = self._changes_image(new[0]) if new else False
            cause = ForkCause.IMAGE_CHANGED if changes else ForkCause.ROLLED_BACK
        prompt = self._last_prompt.extended(self.nodes, node.index, suffix)
        return Placement(node.index, node.path_tokens, suffix, prompt, cause)

    def _place_raw(self, raw: str | list[int], rendering: Rendering) -> Placement:
        """Places a prompt without messages: it continues the longest recorded text that it begins
        with."""
        if isinstance(raw, str):
            lengths = tuple(self._raw_lengths)  # answers are recorded while a thread places
            for length in sorted((n for n in lengths if n <= len(raw)), reverse=True):
                index = self._by_answer.get(raw_key(raw[:length]).chain)
                if index is None:
                    continue
                node = self.nodes[index]
                spoken = rendering.before_stop(node.sampled_ids.tolist())
                if raw[:length].endswith(rendering.tokenizer.decode(spoken)):
                    suffix = np.array(rendering.tokenizer.encode(raw[length:]), np.int32)
                    shared = node.prompt_tokens + len(spoken)
                    cause = None if shared == node.path_tokens else ForkCause.EDITED
                    prompt = prefix(self.nodes, index, shared, suffix)
                    return Placement(index, shared, suffix, prompt, cause)
            ids = rendering.tokenizer.encode(raw, add_special_tokens=True)
        else:
            ids = raw
        prompt = np.array(ids, np.int32)
        parent, shared = self._deepest_common_point(prompt, Match(-1, None), [])
        whole = parent is not None and shared == self.nodes[parent].path_tokens
        cause = None if whole or not self.nodes else ForkCause.NEW_CONVERSATION
        return Placement(parent, shared, prompt[shared:].copy(), prompt, cause)

    def _fork(
        self, conversation: Conversation, keys: Sequence[Key], match: Match, rendering: Rendering
    ) -> Placement:
        if conversation.continues is not None:
            raise RequestError(
                "previous_response_id: this model's chat template cannot append to that response; "
                "send the whole input instead",
                param="previous_response_id",
            )
        prompt = rendering.full(conversation)
        if not self.nodes:
            return Placement(None, 0, prompt, prompt, None)
        cause = self._fork_cause(conversation.messages, keys, match)
        parent, shared = self._deepest_common_point(prompt, match, keys)
        return Placement(parent, shared, prompt[shared:].copy(), prompt, cause)

    def _fork_cause(self, messages: list[Message], keys: Sequence[Key], match: Match) -> ForkCause:
        """Why a conversation cannot extend the turn of its last recorded answer, `match`.

        `keys` has one key per message.
        """
        known = self._last_known(keys)
        if any(message.compacted for message in messages[known + 1 :]):
            return ForkCause.COMPACTION
        if known >= 0 and known + 1 < len(messages):
            return self._cause_after(messages[known + 1 :], self.same_requests(keys[known]), match)
        if known >= 0:  # every message is known, but the turn could not be extended
            return ForkCause.UNPROVABLE_BRIDGE
        for position in reversed(range(len(keys))):
            key = keys[position]
            other = None if isinstance(key, RawKey) else self.same_body(key)
            if other is not None and not isinstance(key, RawKey):
                return self._cause_at(other, key, messages[position + 1 :], match)
        if is_quoted(messages, set(self.quotes[-QUOTED_TURNS:])):
            return ForkCause.COMPACTION
        return ForkCause.NEW_CONVERSATION

    def _foreign_cause(
        self, messages: list[Message], keys: Sequence[Key], match: Match
    ) -> ForkCause:
        """Why a conversation follows a recorded answer with an assistant message that is not one:
        that of its first message which differs from the record."""
        known = self._last_known(keys)
        if not 0 <= known < len(messages) - 1:
            return ForkCause.FOREIGN_ASSISTANT
        return self._cause_after(messages[known + 1 :], self.same_requests(keys[known]), match)

    def _last_known(self, keys: Sequence[Key]) -> int:
        """Index of the last message up to which the conversation was recorded; -1 if none is."""
        return next((i for i in reversed(range(len(keys))) if self.knows_messages(keys[i])), -1)

    def _cause_at(
        self, other: Node, key: ConversationKey, following: list[Message], match: Match
    ) -> ForkCause:
        """Why a conversation forks that has the messages of `other`, but another key."""
        recorded = other.request_key
        if isinstance(recorded, RawKey) or recorded.system != key.system:
            return ForkCause.SYSTEM_CHANGED
        if recorded.tools != key.tools:
            return ForkCause.TOOLS_CHANGED
        # The same request except for a forced call.
        return self._cause_after(following, [other], match) if following else ForkCause.SIBLING

    def _cause_after(self, following: list[Message], asked: list[Node], match: Match) -> ForkCause:
        """Why the messages after the last known one differ from the record."""
        message = following[0]
        if message.role == "assistant":
            return self._cause_of(message, asked)
        node = None if match.node is None else self.nodes[match.node]
        if asked:
            return ForkCause.ROLLED_BACK
        if node is not None and node.children:
            return ForkCause.IMAGE_CHANGED if self._changes_image(message) else ForkCause.EDITED
        if any(each.role == "assistant" for each in following):
            return ForkCause.FOREIGN_ASSISTANT
        return ForkCause.UNPROVABLE_BRIDGE

    def _changes_image(self, message: Message) -> bool:
        """Whether a message that differs from the record has an image that is not recorded, though
        others are: a picture that was encoded again, or made smaller."""
        if not self.has_images:
            return False
        recorded = {image.sha256 for node in self.nodes for image in node.images}
        return any(sha256 not in recorded for sha256 in named([message]))

    def _cause_of(self, message: Message, asked: list[Node]) -> ForkCause:
        answers = [node.marks for node in asked if node.marks is not None]
        return cause_of(message, answers, follows=self.follows)

    def _deepest_common_point(
        self, prompt: Ids, match: Match, keys: Sequence[Key]
    ) -> tuple[int | None, int]:
        likely = [match.node] if match.node is not None else []
        for key in reversed(keys):
            likely += self._by_request.get(key.chain, ())[-2:]
        recent = range(len(self.nodes) - 1, max(-1, len(self.nodes) - 1 - FORK_CANDIDATES), -1)
        best, best_shared = None, 0
        known: dict[int | None, int] = {None: len(prompt)}
        for index in dict.fromkeys([*likely[:FORK_CANDIDATES], *recent]):
            shared = self._common(index, prompt, known)
            if shared > best_shared:
                best, best_shared = index, shared
        if best is not None and self.has_images:
            best_shared = uncut(self.images(best, self.nodes[best].path_tokens), best_shared)
        return self.owner(best, best_shared), best_shared

    def _common(self, index: int, prompt: Ids, known: dict[int | None, int]) -> int:
        """Length of the common prefix of a turn's path and a prompt. `known` holds the results of
        earlier turns (None: of the root), so that each turn's own tokens are compared once."""
        chain = []
        at: int | None = index
        while at is not None and at not in known:
            chain.append(at)
            at = self.nodes[at].parent
        shared = known[at]
        for at in reversed(chain):
            node = self.nodes[at]
            if shared >= node.shared_tokens:
                shared = node.shared_tokens
                same = common_prefix(node.prompt_ids, prompt[shared:])
                shared += same
                if same == len(node.prompt_ids):
                    shared += common_prefix(node.sampled_ids, prompt[shared:])
            known[at] = shared
        return shared

    def owner(self, index: int | None, shared: int) -> int | None:
        """The turn on the path of `index` that added token `shared - 1` of the path."""
        while index is not None and self.nodes[index].shared_tokens >= shared:
            index = self.nodes[index].parent
        return index

    def knows_messages(self, key: Key) -> bool:
        """Whether the conversation of this key was recorded, as a request or with its answer."""
        if key.chain in self._by_answer or key.chain in self._by_request:
            return True
        return self._by_calls.get(key.chain) is not None
