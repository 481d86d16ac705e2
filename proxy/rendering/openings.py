"""The opening of an answer that must begin with a tool call or with text of the agent.

Invariant: an opening is what the renderer itself writes at the beginning of such an answer. It is
appended to the prompt, so it is never sampled or trained. The rest is sampled from the policy
without a grammar, so its log-probabilities are the policy's own.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from proxy.conversation import Conversation, Message, ToolCall
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.families import Family
from proxy.rendering.tokenizer import Tokenizer

_PROBES = ("Ab", "zY")
"""Two words that begin and end differently. Where their renderings differ, the model chooses."""
_ASKED = Message("user", "Hello.")
_OPEN_REASONING = (
    ("<think>", "</think>", "\n</think>\n\n"),
    ("<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant"),
)
"""(what opens the reasoning in a prompt; what an answer without reasoning then begins with; what
ends the reasoning if the rendered answer does not mention it)"""
_BEGUN = " \n<{"
"""Characters that renderings of arguments begin with; they are left to the model."""


class Language(Protocol):
    """The part of `Rendering` that openings need."""

    @property
    def family(self) -> Family: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def full(self, conversation: Conversation) -> Ids: ...

    def parse(
        self, sampled: list[int], prompt_end: Ids, tools: list[dict[str, Any]], *, calls: bool
    ) -> Message: ...


def call_opening(rendering: Language, name: str | None) -> list[int]:
    """The ids that begin a call of the tool `name`, or of any tool if it is None.

    Empty if the model reasons before it calls, because an opening would disable its reasoning.
    Raises RequestError if the beginning of the family's calls cannot be determined.
    """
    if _reasons(rendering):
        return []
    tools = (name,) if name is not None else _PROBES
    written = {
        (tool, word): _written(rendering, Message("assistant", tool_calls=[_call(tool, word)]))
        for tool in tools
        for word in (*_PROBES, None)
    }
    opening = _common([text or "" for text in written.values()]).rstrip(_BEGUN)
    spoken = _written(rendering, Message("assistant", _PROBES[0])) or ""
    begins = not spoken.startswith(opening) and (name or "") in opening
    named_first = name is None and rendering.family.named_before_call
    known = (_is_read(rendering, written[tool, _PROBES[0]] or "", tool) for tool in tools)
    if named_first or not begins or not all(known):
        raise RequestError(
            f"tool_choice: a call cannot be required with the {rendering.family.name!r} template; "
            "name the tool, or set tool_choice to auto",
            param="tool_choice",
        )
    if any(silent in opening for _, silent, _ in _OPEN_REASONING):
        return []
    return rendering.tokenizer.encode(opening)


def text_opening(rendering: Language, text: str) -> list[int]:
    """The ids that begin an answer with `text`. Raises RequestError."""
    written = _written(rendering, Message("assistant", text)) or ""
    before, found, _ = written.partition(text)
    if not found:
        raise RequestError(
            f"messages: the {rendering.family.name!r} template cannot continue this last assistant "
            "message (does it begin or end with white space?); end with a user message",
            param="messages",
        )
    return rendering.tokenizer.encode(before + text)


def _reasons(rendering: Language) -> bool:
    """Whether the template allows reasoning between the prompt and a call."""
    asked = rendering.tokenizer.decode(rendering.full(Conversation([_ASKED])).tolist())
    for opener, silent, _ in _OPEN_REASONING:
        if silent in asked.rpartition(opener)[2] and opener in asked:
            return False  # the prompt itself closes the reasoning
    word = _PROBES[0]
    call = ToolCall("functions.f:0", "f", "{}")
    written = _written(rendering, Message("assistant", reasoning=word, tool_calls=[call]))
    return written is not None and word in written


def _written(rendering: Language, answer: Message) -> str | None:
    """The text that the template writes for an answer, after the prompt."""
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
    """Whether the family's own parser finds the call in what its template writes."""
    ids = rendering.tokenizer.encode(written)
    prompt = rendering.full(Conversation([_ASKED]))
    calls = rendering.parse(ids, prompt, [], calls=True).tool_calls
    return [call.name for call in calls] == [tool]


def _common(texts: list[str]) -> str:
    """The common prefix of all texts."""
    first, last = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:size]


def _call(tool: str, word: str | None) -> ToolCall:
    arguments = {} if word is None else {word: word}
    return ToolCall(f"functions.{tool}:0", tool, orjson.dumps(arguments).decode())
