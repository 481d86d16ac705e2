"""Shows why a turn forks: what the agent sent against what was recorded.

The recorded conversation that is compared is the one that begins with most of the messages that the
agent sent. Invariant: the comparison takes a bounded time, whatever the messages hold.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from proxy.conversation.images import told_apart
from proxy.conversation.messages import Message, load_answer, split_reasoning
from proxy.conversation.recorded import load_conversation
from proxy.extras.view.answers import FieldChange, ForkJson, ForkTokens, ShownTokens
from proxy.extras.view.bounded import message_json
from proxy.extras.view.session_turns import SessionTurns
from proxy.extras.view.turn_tokens import pieces, turn_tokens
from proxy.records import Ids, ImageSpan, Turn
from proxy.rendering.tokenizer import Tokenizer

CANDIDATES = 12
"""Recorded turns that are compared: those before the fork, and those that it names."""
DIFF_CHARS = 6_000
"""Characters of each text that are compared word by word, from the first difference on."""
CONTEXT_CHARS = 160
SHOWN_TOKENS = 32
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class _Recorded:
    turn: Turn
    messages: list[Message]
    tools: list[dict[str, Any]]


async def fork_json(turns: SessionTurns, index: int, tokenizer: Tokenizer | None) -> ForkJson:
    """The differences at the turn's fork, in messages and in tokens."""
    turn = await turns.read(index)
    answer: ForkJson = {
        "index": index,
        "cause": turn.fork_cause,
        "against": None,
        "tokens": await _tokens(turns, turn, turn.parent, tokenizer),
    }
    await turns.conversation(index)
    sent = load_conversation(turns, index)
    if sent is None:
        return answer
    recorded = await _closest(turns, turn, sent.conversation.messages)
    if recorded is None:
        return answer
    messages = sent.conversation.messages
    common = _common(messages, recorded.messages)
    ours, theirs = _at(recorded.messages, common), _at(messages, common)
    tokens = await _tokens(turns, turn, recorded.turn.index, tokenizer)
    return {
        "index": index,
        "cause": turn.fork_cause,
        "tokens": tokens or answer["tokens"],
        "against": recorded.turn.index,
        "common": common,
        "sent_messages": len(messages),
        "recorded_messages": len(recorded.messages),
        "recorded": message_json(ours) if ours else None,
        "sent": message_json(theirs) if theirs else None,
        "changes": [*_changes(ours, theirs), *_tools(recorded.tools, sent.conversation.tools)],
    }


async def _closest(turns: SessionTurns, turn: Turn, sent: Sequence[Message]) -> _Recorded | None:
    """The recorded conversation that has most of the messages that were sent."""
    named = [turn.parent] if turn.parent is not None else []
    before = range(turn.index - 1, max(-1, turn.index - 1 - CANDIDATES), -1)
    best: _Recorded | None = None
    best_common = -1
    for index in dict.fromkeys([*before, *named]):
        await turns.conversation(index)
        loaded = load_conversation(turns, index)
        if loaded is None:
            continue
        messages = list(loaded.conversation.messages)
        if turns[index].answer:
            messages.append(load_answer(turns[index].answer))
        common = _common(sent, messages)
        # Of equal ones the latest; but one that the request merely repeats shows no difference.
        if common > best_common:
            best = _Recorded(turns[index], messages, loaded.conversation.tools)
            best_common = common
    return best


def _common(sent: Sequence[Message], recorded: Sequence[Message]) -> int:
    for at, (one, other) in enumerate(zip(sent, recorded, strict=False)):
        if _content(one) != _content(other):
            return at
    return min(len(sent), len(recorded))


def _content(message: Message) -> tuple[Any, ...]:
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    return (message.role, *_texts(message), calls)


def _texts(message: Message) -> tuple[str, str]:
    """Reasoning and text. A recorded message is the agent's copy of it up to white space."""
    return split_reasoning(message) if message.role == "assistant" else ("", message.text)


def _at(messages: Sequence[Message], index: int) -> Message | None:
    return messages[index] if index < len(messages) else None


def _changes(recorded: Message | None, sent: Message | None) -> list[FieldChange]:
    if recorded is None or sent is None:
        return []
    found: list[FieldChange] = []
    if recorded.role != sent.role:
        found.append({"field": "role", "parts": [["-", recorded.role], ["+", sent.role]]})
    texts = zip(("reasoning", "text"), _texts(recorded), _texts(sent), strict=True)
    pairs = [(name, ours, theirs) for name, ours, theirs in texts]
    for at in range(max(len(recorded.tool_calls), len(sent.tool_calls))):
        calls = [each.tool_calls[at : at + 1] for each in (recorded, sent)]
        ours, theirs = (f"{c[0].name}({c[0].arguments})" if c else "" for c in calls)
        pairs.append((f"tool call {at + 1}", ours, theirs))
    for name, ours, theirs in pairs:
        if ours != theirs:
            parts = difference(told_apart(ours), told_apart(theirs))
            found.append({"field": name, "parts": parts})
    return found


def _tools(recorded: list[dict[str, Any]], sent: list[dict[str, Any]]) -> list[FieldChange]:
    ours, theirs = (
        orjson.dumps(tools, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode()
        for tools in (recorded, sent)
    )
    return [] if ours == theirs else [{"field": "tools", "parts": difference(ours, theirs)}]


def difference(recorded: str, sent: str) -> list[list[str]]:
    """`[operation, text]` in order: `=` in both, `-` only recorded, `+` only sent, `…` a number of
    equal or of further characters that are left out."""
    start = _equal_chars(recorded, sent)
    end = _equal_chars(recorded[start:][::-1], sent[start:][::-1])
    ours, theirs = recorded[start : len(recorded) - end], sent[start : len(sent) - end]
    parts = _context(recorded[:start], from_end=True)
    parts += _word_difference(ours[:DIFF_CHARS], theirs[:DIFF_CHARS])
    for mark, text in (("-", ours), ("+", theirs)):
        if len(text) > DIFF_CHARS:
            parts.append(["…", f"{len(text) - DIFF_CHARS:,} more characters ({mark})"])
    return parts + _context(recorded[len(recorded) - end :], from_end=False)


def _context(text: str, *, from_end: bool) -> list[list[str]]:
    if len(text) <= CONTEXT_CHARS:
        return [["=", text]] if text else []
    left_out = ["…", f"{len(text) - CONTEXT_CHARS:,} equal characters"]
    if from_end:
        return [left_out, ["=", text[-CONTEXT_CHARS:]]]
    return [["=", text[:CONTEXT_CHARS]], left_out]


def _word_difference(ours: str, theirs: str) -> list[list[str]]:
    before, after = _WORDS.findall(ours), _WORDS.findall(theirs)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=len(before) > 500)
    parts: list[list[str]] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            parts.append(["=", "".join(before[a:b])])
            continue
        for mark, words in (("-", before[a:b]), ("+", after[c:d])):
            if words:
                parts.append([mark, "".join(words)])
    return parts


def _equal_chars(one: str, other: str) -> int:
    """Length of the common prefix, found by halving, so that the comparisons are made in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


async def _tokens(
    turns: SessionTurns, turn: Turn, against: int | None, tokenizer: Tokenizer | None
) -> ForkTokens | None:
    """The tokens around the fork: the last shared ones, and how each side goes on. None if the
    prompt does not begin with tokens of the turn `against`."""
    if against is None or turn.parent is None:
        return None
    parent = turn_tokens(await turns.path(against))
    at = turn.shared_tokens
    shared = turn_tokens(await turns.path(turn.parent)).ids[:at]
    if not np.array_equal(parent.ids[:at], shared):
        return None

    def shown(ids: Ids, images: Sequence[ImageSpan], start: int, end: int) -> ShownTokens:
        found, places = _with_images(ids, images, start, end)
        texts = pieces(found, tokenizer) if tokenizer else None
        for place, image in places:
            found[place] = image.token
        named = [(place, image.tokens, image.sha256) for place, image in places]
        return {"ids": found, "texts": texts, "images": named}

    return {
        "parent": against,
        "shared": at,
        "before": shown(parent.ids, parent.images, max(0, at - SHOWN_TOKENS), at),
        "recorded": shown(parent.ids, parent.images, at, at + SHOWN_TOKENS),
        "sent": shown(turn.prompt_ids, turn.images, 0, SHOWN_TOKENS),
    }


def _with_images(
    ids: Ids, images: Sequence[ImageSpan], start: int, end: int
) -> tuple[list[int], list[tuple[int, ImageSpan]]]:
    """The ids `[start, end)` with one id of each image that is at least partly there, and the
    places of these."""
    found, places, at = list[int](), list[tuple[int, ImageSpan]](), start
    for image in images:
        last = image.offset + image.tokens
        if last <= start or image.offset >= end:
            continue
        found += ids[at : max(at, image.offset)].tolist()
        places.append((len(found), image))
        found.append(int(ids[image.offset]))
        at = last
    return [*found, *ids[at:end].tolist()], places
