"""What an engine is to the proxy: prompt ids in, sampled ids out, as they are sampled.

Invariant: the ids of the chunks of one call, concatenated, are exactly what the engine sampled,
the stop token included where it sampled one, each with its log-probability.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.records import FinishReason, Ids, VersionSpan


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the engine is asked for. None leaves the engine's own default, except that engines
    must be told `top_p=1, top_k=-1, min_p=0, repetition_penalty=1` explicitly: their defaults
    come from the model's generation_config.json and would bend the distribution unseen.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    """Whether the agent is shown them; they are recorded in any case."""
    top_logprobs: int = 0
    """Alternatives per token, for agents that ask for them."""
    structured: dict[str, Any] | None = None
    """The engine's guided-decoding request, passed through."""
    trained: bool = False
    """What is sampled may be trained: no text-only engine may answer."""


@dataclass(slots=True)
class Chunk:
    """Some sampled tokens; the last chunk of a call has `finish_reason` set."""

    ids: list[int]
    logprobs: list[float]
    """One per id."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or token that ended the call, where the engine tells."""
    versions: tuple[VersionSpan, ...] = ()
    """On the last chunk: spans over the whole answer."""


@dataclass(slots=True)
class EngineInfo:
    """What `GET /engines` shows of one replica."""

    name: str
    url: str
    healthy: bool = True
    in_flight: int = 0
    version: int = 0
    model: str | None = None
    max_context_tokens: int | None = None
    text_only: bool = False
    """It tells no tokens: its answers are recorded as text, and never trained."""
    details: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """One replica. Implementations: `vllm`, `completions`, `sglang`, `scripted`, …"""

    @property
    def info(self) -> EngineInfo: ...

    def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[Chunk, None]:
        """`request_id` is `SESSION#TURN`. Yields chunks as they are sampled, or one chunk with all
        where `stream` is False, which costs less. Closing the generator (`aclose`, or cancelling
        its reader) aborts the call.

        Raises:
            EngineError: the replica failed; `started` tells whether a token was yielded before.
            RequestError: the engine refuses these parameters; another replica would, too.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    async def check(self) -> None:
        """Refreshes `info`; raises EngineError when the replica does not answer."""
        ...

    async def close(self) -> None: ...
