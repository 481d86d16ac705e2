"""The seam between an agent's dialect and everything behind it.

A dialect is one module: it parses a request into a `Call`, and writes `Outcome`s as a whole body
or as a stream. Everything between is the same for all of them.
Invariant: a stream and a whole body of the same outcomes say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.conversation import Conversation, Message
from proxy.errors import ProxyError
from proxy.records import EMPTY_IDS, FinishReason, Ids
from proxy.rendering.deltas import Delta
from proxy.wire.fields import Fields

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ForcedCall:
    name: str | None = None
    """None: of any tool."""


@dataclass(slots=True)
class Options:
    """What an agent asks of the sampling; None where it says nothing."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    structured: dict[str, Any] | None = None
    """The engine's guided decoding, as vLLM's `structured_outputs`."""
    tool_calls: bool = True
    """False: calls stay text (`tool_choice: "none"`)."""
    forced: ForcedCall | None = None
    """The answer must begin with a tool call."""
    parallel_calls: bool = True
    """False: the answer ends where a second call begins."""


@dataclass(slots=True)
class Call:
    """One request, free of its dialect."""

    model: str
    """Echoed as it was asked for."""
    conversation: Conversation
    options: Options
    n: int = 1
    stream: bool = False
    opening: Ids = field(default_factory=lambda: EMPTY_IDS)
    """The answer's beginning where it is not sampled: a forced call's, or the agent's own text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What only the dialect itself reads again when it writes."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """For agents that ask for log-probabilities."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Outcome:
    """One answer, recorded."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt: those that an earlier call of the session had already."""
    completion_tokens: int
    stop_string: str | None = None
    tokens: list[SampledToken] = field(default_factory=list)
    turn: int = 0
    prompt_ids: Ids | None = None
    """What the engine was given; None for an answer that is given again."""
    sampled_ids: Ids | None = None


@dataclass(slots=True)
class Piece:
    """Some of an answer while it is sampled."""

    choice: int
    deltas: list[Delta]
    tokens: list[SampledToken] = field(default_factory=list)


class StreamWriter(Protocol):
    """One response's events, in order: `start`, any `piece`s, `end`."""

    def start(self, prompt_tokens: int, turn: int) -> bytes: ...

    def piece(self, piece: Piece) -> bytes: ...

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        """The terminal events; sent only after the outcomes are recorded."""
        ...

    def error(self, error: ProxyError) -> bytes:
        """For a call that fails after the stream began."""
        ...


class Dialect(Protocol):
    name: str

    def parse(self, fields: Fields, headers: Headers) -> Call:
        """Raises RequestError for what cannot be honoured."""
        ...

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes: ...

    def writer(self, call: Call, answer_id: str) -> StreamWriter: ...

    def error(self, error: ProxyError) -> bytes: ...


KEEP_ALIVE = b": keep-alive\n\n"
"""An SSE comment, which every client skips."""


def error_type(status: int) -> str:
    """OpenAI's name for a status."""
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    if status == 429:
        return "rate_limit_error"
    if status >= 500:
        return "server_error"
    return named.get(status, "invalid_request_error")
