"""How an answer is begun for the model: a call that is forced, or text that the agent gave.

Invariant: an opening is what the renderer itself would write at the beginning of such an answer. It
is appended to the prompt, and so it is never sampled and never trained; what follows is sampled
from the policy as it is, without a grammar, and its log-probabilities are the policy's own.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from proxy.conversation import Conversation, Message, ToolCall
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.tokenizer import Tokenizer

_PROBES = ("Ab", "zY")
"""Two words that begin and end differently: where renderings of them part, the model chooses."""
_NAMED_FIRST = frozenset({"inkling"})
"""Families that write a tool's name before they say that it is a call."""
_ASKED = Message("user", "Hello.")
_OPEN_REASONING = (
    ("<think>", "</think>", "\n</think>\n\n"),
    ("<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant"),
)
"""Per way in which a prompt opens the reasoning: what an answer without any begins with there, and
what ends the reasoning where the answer says nothing of it."""
_BEGUN = " \n<{"
"""What the renderings of arguments, or of none, begin with in common: left to the model."""


class Language(Protocol):
    """Of a `Rendering`: how a conversation is written, and an answer read."""

    name: str
    tokenizer: Tokenizer

    def full(self, conversation: Conversation) -> Ids: ...

    def parse(
        self, sampled: list[int], prompt_end: Ids, tools: list[dict[str, Any]], *, calls: bool
    ) -> Message: ...


def call_opening(rendering: Language, name: str | None) -> list[int]:
    """The tokens that begin a call, of the tool `name` or of any. Raises RequestError where the
    family's calls cannot be begun so."""
    tools = (name,) if name is not None else _PROBES
    written = {
        (tool, word): _written(rendering, Message("assistant", tool_calls=[_call(tool, word)]))
        for tool in tools
        for word in (*_PROBES, None)
    }
    opening = _common([text or "" for text in written.values()]).rstrip(_BEGUN)
    spoken = _written(rendering, Message("assistant", _PROBES[0])) or ""
    begins = not spoken.startswith(opening) and (name or "") in opening
    named_first = name is None and rendering.name in _NAMED_FIRST
    known = (_is_read(rendering, written[tool, _PROBES[0]] or "", tool) for tool in tools)
    if named_first or not begins or not all(known):
        raise RequestError(
            f"tool_choice: a call cannot be forced so with the {rendering.name!r} template; name "
            "the tool, or say auto",
            param="tool_choice",
        )
    return rendering.tokenizer.encode(opening)


def text_opening(rendering: Language, text: str) -> list[int]:
    """The tokens that begin an answer with `text`. Raises RequestError."""
    written = _written(rendering, Message("assistant", text)) or ""
    before, found, _ = written.partition(text)
    if not found:
        raise RequestError(
            f"messages: the {rendering.name!r} template cannot continue this last assistant "
            "message (white space around it?); end with a user's message",
            param="messages",
        )
    return rendering.tokenizer.encode(before + text)


def _written(rendering: Language, answer: Message) -> str | None:
    """What the template writes of an answer behind the prompt that asks for one."""
    try:
        asked, whole = (
            rendering.tokenizer.decode(rendering.full(Conversation(messages)).tolist())
            for messages in ([_ASKED], [_ASKED, answer])
        )
    except RequestError:
        return None
    if whole.startswith(asked):
        return whole[len(asked) :]
    for opener, silent, end in _OPEN_REASONING:
        before, found, _ = asked.rpartition(opener)
        if found and whole.startswith(before):
            answer_text = whole[len(before) :].removeprefix(opener).lstrip()
            return answer_text if answer_text.startswith(silent) else end + answer_text
    return None


def _is_read(rendering: Language, written: str, tool: str) -> bool:
    """Whether the family's own reader finds the call in what its template writes."""
    ids = rendering.tokenizer.encode(written)
    prompt = rendering.full(Conversation([_ASKED]))
    calls = rendering.parse(ids, prompt, [], calls=True).tool_calls
    return [call.name for call in calls] == [tool]


def _common(texts: list[str]) -> str:
    """What all of them begin with."""
    first, last = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:size]


def _call(tool: str, word: str | None) -> ToolCall:
    arguments = {} if word is None else {word: word}
    return ToolCall(f"functions.{tool}:0", tool, orjson.dumps(arguments).decode())
