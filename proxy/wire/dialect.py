"""The protocol of a dialect, and the types that dialects share with the rest of the proxy.

A dialect is one module: it parses a request into a `Call`, and writes `Outcome`s as a whole body
or as a stream. Everything in between is the same for all dialects.
Invariant: a stream and a whole body of the same outcomes have the same content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from proxy.conversation import Conversation, Message
from proxy.conversation.references import ReferringConversation
from proxy.errors import ProxyError
from proxy.records import FinishReason, Ids
from proxy.rendering.deltas import Delta, ResultDelta
from proxy.wire.fields import Fields, Note

if TYPE_CHECKING:  # the trainer, which reads `Options`, loads neither
    from proxy.wire.images import SentImages
    from proxy.wire.provided import PastCall

Headers = Mapping[str, str]


class ForcedCall(msgspec.Struct, frozen=True):
    """The agent requires a tool call (`tool_choice`)."""

    name: str | None = None
    """The required tool; None for any tool."""


BOUNDS: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "seed": (-(2**63), 2**63 - 1),
}
"""The least and the greatest value of each option of sampling."""
WHOLE = frozenset(("max_tokens", "top_k", "seed"))
"""Those that are integers."""


class Options(msgspec.Struct):
    """Sampling options of a request; None where the agent sent nothing."""

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
    every_token: bool = False
    """Log-probabilities of all sampled tokens are wanted, not only of those of the text."""
    top_logprobs: int = 0
    structured: dict[str, Any] | None = None
    """Guided decoding, in the form of vLLM's `structured_outputs`."""
    tool_calls: bool = True
    """False: tool calls remain text (`tool_choice: "none"`)."""
    forced: ForcedCall | None = None
    """The answer must make a tool call."""
    parallel_calls: bool = True
    """False: the answer ends where a second call begins."""


class Call(msgspec.Struct):
    """One request, independent of its dialect."""

    model: str
    """The requested model name, which the answer repeats."""
    conversation: Conversation
    options: Options
    referring: ReferringConversation | None = None
    """Set if the conversation refers to parts of recorded answers, which must be resolved first."""
    n: int = 1
    stream: bool = False
    is_small: bool = False
    """Whether the body is so short that its prompt exceeds no bound on characters."""
    is_large: bool = False
    """Whether the call should be keyed and rendered in a thread instead of the event loop."""
    unknown: tuple[str, ...] = ()
    """The names of the request's fields that nobody knows (`known_fields`)."""
    free_form: frozenset[str] = frozenset()
    """The names of tools that take one text instead of arguments."""
    provider_tools: dict[str, dict[str, Any]] = {}
    """By name, the entries of tools whose calls the proxy answers itself (`wire.provided`)."""
    past_calls: list[PastCall] = []
    """Calls of such tools in a history that may lack their results."""
    notes: list[Note] = []
    """What of the request is not taken as it is."""
    images: SentImages | None = None
    """The images of its messages, if the model reads them and there are any."""
    extra: dict[str, Any] = {}
    """Values that only the dialect itself uses, when it writes the answer."""


class SampledToken(msgspec.Struct, frozen=True):
    """A sampled token, for agents that request log-probabilities."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Outcome(msgspec.Struct):
    """One recorded answer."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Number of prompt tokens that an earlier call of the session already had."""
    completion_tokens: int
    reasoning_tokens: int = 0
    """Those of the completion that are its reasoning, without markers."""
    stop_string: str | None = None
    tokens: list[SampledToken] = []
    turn: int = 0
    prompt_ids: Ids | None = None
    """The prompt that the engine got."""
    sampled_ids: Ids | None = None
    results: tuple[ResultDelta, ...] = ()
    """Of the calls that the proxy has run itself."""
    before: tuple[Outcome, ...] = ()
    """The answers that this one continues after such results, in order."""


class Piece(msgspec.Struct, gc=False):
    """A part of an answer while it is sampled.

    A call keeps its pieces until it ends. With tuples, the collector of garbage does not look at
    them again and again.
    """

    choice: int
    deltas: tuple[Delta, ...]
    tokens: tuple[SampledToken, ...] = ()
    turn: int = 0
    """The turn that sampled it. A call that the agent requires may have a turn of its own."""


class StreamWriter(Protocol):
    """Writes the events of one response, called in this order: `start`, any number of `piece`s,
    `end`."""

    def start(self, prompt_tokens: int, turn: int) -> bytes: ...

    def piece(self, piece: Piece) -> bytes: ...

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        """The terminal events, which are sent only after the outcomes are recorded."""
        ...

    def error(self, error: ProxyError) -> bytes:
        """The event for a call that fails after the stream has begun."""
        ...


class Dialect(Protocol):
    """One model API. A dialect is stateless; `registry` creates it without arguments."""

    name: str
    """Recorded with each turn."""
    route: str
    """The path after `/v1/`, without leading or trailing slash."""

    def parse(self, fields: Fields, headers: Headers) -> Call:
        """Raises RequestError for a request that is malformed or not supported."""
        ...

    def whole(self, call: Call, answer_id: str, outcomes: Sequence[Outcome]) -> bytes: ...

    def writer(self, call: Call, answer_id: str) -> StreamWriter: ...

    def error(self, error: ProxyError) -> bytes: ...


_SAMPLING: dict[str, tuple[Callable[..., Any], float, float]] = {
    name: (Fields.integer if name in WHOLE else Fields.number, low, high)
    for name, (low, high) in BOUNDS.items()
}
"""The fields that are options of the same name: how each is read, and its range."""


def read_sampling(fields: Fields) -> Options:
    """The options that have the same name in every dialect. Raises RequestError."""
    options = Options()
    for name in _SAMPLING:
        if name in fields.data:  # agents send few of them
            read, low, high = _SAMPLING[name]
            setattr(options, name, read(fields, name, low, high))
    return options


KEEP_ALIVE = b": keep-alive\n\n"
"""An SSE comment, which every client ignores."""


def error_type(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    named = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    if status == 429:
        return "rate_limit_error"
    if status >= 500:
        return "server_error"
    return named.get(status, "invalid_request_error")
