"""The opening of an answer that must begin with a tool call or with text of the agent.

Invariant: an opening is what the renderer itself writes at the beginning of such an answer, or
between what the answer says and its call. It is appended to the prompt, so it is never sampled or
trained. The rest is sampled from the policy without a grammar, so its log-probabilities are the
policy's own.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson
from msgspec.structs import replace

from proxy.conversation import Conversation, Message, ToolCall
from proxy.errors import RequestError
from proxy.records import Ids
from proxy.rendering.families import Family
from proxy.rendering.tokenizer import Tokenizer

_PROBES = ("Ab", "zY")
"""Two words that begin and end differently. Where their renderings differ, the model chooses."""
_ASKED = Message("user", "Hello.")
_SAID = "Qk"
"""Stands for what an answer says before its call; no template writes it."""
_MARKER_CHARS = 3
"""Markers are longer."""
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

    Empty if the model reasons before it calls, because an opening would disable its reasoning; see
    `call_after`. Raises RequestError if the beginning of the family's calls cannot be determined.
    """
    opening, rests = _opening(rendering, name, Message("assistant"))
    text = _written(rendering, Message("assistant", _PROBES[0])) or ""
    begins = not text.startswith(opening) and (name or "") in opening
    named_first = name is None and rendering.family.named_before_call
    asked = rendering.full(Conversation([_ASKED]))
    encode = rendering.tokenizer.encode
    known = (
        _called(rendering, encode(opening + rest), asked) == tool for tool, rest in rests.items()
    )
    if named_first or not begins or not all(known):
        raise RequestError(
            f"tool_choice: a call cannot be required with the {rendering.family.name!r} template; "
            "name the tool, or set tool_choice to auto",
            param="tool_choice",
        )
    silenced = any(silent in opening for _, silent, _ in _OPEN_REASONING)
    return [] if silenced or _reasons(rendering) else encode(opening)


def call_after(
    rendering: Language, spoken: list[int], prompt_end: Ids, name: str | None
) -> tuple[int, list[int]]:
    """The number of ids of an answer without a call that stay, and the ids that begin a call of the
    tool `name` after them.

    If no call can be read after the answer (it ends within a malformed call), none of its ids stay.
    """
    encode = rendering.tokenizer.encode
    said = rendering.parse(spoken, prompt_end, [], calls=False)
    if said.text or said.reasoning:
        before = Message("assistant", said.text and _SAID, None if said.text else _SAID)
        opening, rests = _opening(rendering, name, before)
        if not said.text:
            opening = _without_overlap(rendering.tokenizer.decode(spoken), opening)
        begun = encode(opening)
        tool, rest = next(iter(rests.items()))
        if opening and _called(rendering, [*spoken, *begun, *encode(rest)], prompt_end) == tool:
            return len(spoken), begun
    opening, _ = _opening(rendering, name, Message("assistant"))
    return 0, encode(opening)


def written_before_call(rendering: Language) -> str | None:
    """The text between the prompt and the name of any call that is all that an answer says; None if
    the template writes none. Reasoning that the template closes by itself is left out."""
    opening, _ = _opening(rendering, None, Message("assistant"))
    for _, silent, _ in _OPEN_REASONING:
        opening = opening.rpartition(silent)[2]
    return opening or None


def written_before_text(rendering: Language) -> str | None:
    """The text between the prompt and an answer's text, as `written_before_call` has it."""
    written = _written(rendering, Message("assistant", _PROBES[0]))
    if written is None:
        return None
    before = written.partition(_PROBES[0])[0]
    for _, silent, _ in _OPEN_REASONING:
        before = before.rpartition(silent)[2]
    return before


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


def after_prompt(asked: str, whole: str) -> str | None:
    """The text that an answer adds to the prompt `asked`, where `whole` is the rendering of both.
    None: the template writes the prompt of an answered conversation in another way."""
    if whole.startswith(asked):
        return whole[len(asked) :]
    for opener, silent, end in _OPEN_REASONING:
        before, found, _ = asked.rpartition(opener)
        if found and whole.startswith(before):
            answer_text = whole[len(before) :].removeprefix(opener).lstrip()
            return answer_text if answer_text.startswith(silent) else end + answer_text
    return None


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
    return after_prompt(asked, whole)


def _opening(rendering: Language, name: str | None, before: Message) -> tuple[str, dict[str, str]]:
    """The text between `before` (nothing, or _SAID) and the part of a call that the model chooses;
    and, by tool, the rest of a call that begins with it."""
    tools = (name,) if name is not None else _PROBES
    written = {}
    for tool in tools:
        for word in (*_PROBES, None):
            text = _written(rendering, replace(before, tool_calls=[_call(tool, word)])) or ""
            written[tool, word] = text.rpartition(_SAID)[2]
    opening = _common(list(written.values())).rstrip(_BEGUN)
    return opening, {tool: written[tool, _PROBES[0]][len(opening) :] for tool in tools}


def _without_overlap(text: str, opening: str) -> str:
    """The opening without the marker that ends the reasoning, if `text` ends with that marker."""
    said, begun = text.rstrip(), opening.lstrip()
    for size in range(min(len(said), len(begun)), _MARKER_CHARS, -1):
        if said.endswith(begun[:size]):
            return begun[size:]
    return opening


def _called(rendering: Language, ids: list[int], prompt_end: Ids) -> str | None:
    """The tool that an answer calls, by the family's own parser; None unless it is one call."""
    calls = rendering.parse(ids, prompt_end, [], calls=True).tool_calls
    return calls[0].name if len(calls) == 1 else None


def _common(texts: list[str]) -> str:
    """The common prefix of all texts."""
    first, last = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:size]


def _call(tool: str, word: str | None) -> ToolCall:
    arguments = {} if word is None else {word: word}
    return ToolCall(f"functions.{tool}:0", tool, orjson.dumps(arguments).decode())
