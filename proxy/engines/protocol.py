"""The protocol of an engine: prompt ids in, sampled ids out while they are sampled.

Invariant: the concatenated ids of a call's chunks are exactly what the engine sampled, including
the stop token if it sampled one, each with its log-probability.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from proxy.conversation.messages import Conversation
from proxy.records import Alternatives, FinishReason, Ids, ImageSpan, RoutedExperts, VersionSpan


class PreparedImage(msgspec.Struct, frozen=True):
    """What an engine made of an image.

    Example: PreparedImage("4aeb5f…", 6, 151655, (1, 4, 6), item="gqxwaX…")
    """

    digest: str
    tokens: int
    token: int
    grid: tuple[int, ...]
    """These four as in `ImageSpan`."""
    item: str
    """The engine's own form of pixels and all else that the model gets, in base64."""


class PromptImages(msgspec.Struct, frozen=True):
    """The images of a prompt."""

    spans: tuple[ImageSpan, ...]
    """With offsets in the prompt."""
    item: Callable[[ImageSpan], Awaitable[str]]
    """Returns `PreparedImage.item` of an image. Raises EngineError and StoreError."""


COLDEST = 0.01
"""vLLM samples at this temperature where less is asked for, unless it is 0."""


class Sampling(msgspec.Struct, frozen=True):
    """The sampling parameters of a call. None leaves the engine's own default.

    Engine clients must send `top_p=1, top_k=-1, min_p=0, repetition_penalty=1` explicitly: the
    engines' defaults come from the model's generation_config.json and would silently change the
    distribution.
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
    first_seed: int | None = None
    """The seed of the call that began the answer, if another one goes on with it. An engine that
    derives the random numbers of each position from the seed (`trainer.weight_sync.cpu_seeds`)
    uses it in place of `seed`; others would repeat those of the first tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    """Whether the agent gets log-probabilities. They are always recorded."""
    top_logprobs: int = 0
    """Number of alternatives per token, for agents that request them."""
    alternatives: int = 0
    """Number of alternatives per token to record, at least `top_logprobs`."""
    pinned_alternatives: int = 0
    """Number of those that are recorded whatever the agent requests: training may need them."""
    structured: dict[str, Any] | None = None
    """Guided decoding, in the form of vLLM's `structured_outputs`."""
    trained: bool = False
    """Whether the answer may be trained. If so, no text-only engine may sample it."""
    policy: str = ""
    """The policy that samples (`proxy.routing.policies`); empty: the engine's own weights."""
    adapter: str = ""
    """The engine's name of the adapter that samples: one version of the policy. `Generation` sets
    it for each call."""
    experts_from: int | None = None
    """Index in the prompt of the first token whose routed experts are wanted; None: none are."""
    conversation: Conversation | None = None
    """What the prompt says, for engines that take messages instead of ids (`chat`)."""
    images: PromptImages | None = None
    """The images of the prompt, whose ids are below 0 there; None: it has none. Only engines whose
    `EngineInfo.images` is True get such calls."""


class Chunk(msgspec.Struct):
    """A group of sampled tokens; the last chunk of a call has `finish_reason` set."""

    ids: list[int]
    logprobs: list[float]
    """One per id."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """For each id what an agent gets that requests `Sampling.top_logprobs`."""
    alternatives: Alternatives | None = None
    """A row of `Sampling.alternatives` per id, if they are wanted and the engine reports them."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or token that ended the call, if the engine reports it."""
    versions: tuple[VersionSpan, ...] = ()
    """In the last chunk: spans over the whole answer, or empty."""
    routed_experts: RoutedExperts | None = None
    """In the last chunk: the rows from `Sampling.experts_from` to the token before the last one of
    the answer, if they are wanted and the engine reports them."""

    def by_token(self) -> Iterator[Chunk]:
        """The same tokens one by one, without what is only in the last chunk."""
        for number in range(len(self.ids)):
            one = slice(number, number + 1)
            yield Chunk(
                self.ids[one],
                self.logprobs[one],
                None if self.top_logprobs is None else self.top_logprobs[one],
                None if self.alternatives is None else self.alternatives[one],
            )


@dataclass(slots=True)
class EngineInfo:
    """The state of one replica, as in `GET /engines`."""

    name: str
    url: str
    healthy: bool = True
    in_flight: int = 0
    version: int = 0
    reports_version: bool = False
    """`version` is the engine's own report; otherwise, it is unknown."""
    model: str | None = None
    max_context_tokens: int | None = None
    cache_tokens: int | None = None
    """Number of tokens that the KV cache holds; None if the engine does not report it."""
    adapters: bool = False
    """Samples with a LoRA adapter if a call names one."""
    images: bool | None = False
    """Prepares images, and samples with them; None: it has not been asked yet."""
    text_only: bool = False
    """Does not report token ids; its answers are never trained."""
    details: dict[str, Any] = field(default_factory=dict)


Take = Callable[[Chunk], None]
"""Takes the chunks of a call in order. An error that it raises ends the call."""


class Engine(Protocol):
    """One replica. Implementations: `vllm`, `completions`, `sglang`, …"""

    @property
    def info(self) -> EngineInfo: ...

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        take: Take,
        *,
        request_id: str,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        """`request_id` is `SESSION#TURN`, or `SESSION#TURN.CALL` where another call sampled the
        first tokens of the answer. Passes chunks to `take` as they are sampled, from the code that
        receives them, or one chunk with all where `stream` is False, which costs less. If the task
        is cancelled, or `take` raises an error before the last chunk, the call is aborted.

        Raises:
            EngineError: the replica failed. The tokens that `take` got before stay valid.
            EngineRefusal: the engine refuses these parameters, as another replica would.
        """
        ...

    async def abort(self, request_id: str) -> None: ...

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        """Prepares an image, if `EngineInfo.images` is True.

        Raises:
            EngineError: the replica failed.
            EngineRefusal: the image cannot be read.
        """
        ...

    def forget(self, session_id: str) -> None:
        """Frees what the engine keeps of a session that has ended."""
        ...

    async def check(self) -> None:
        """Updates `info`. Raises EngineError if the replica does not answer."""
        ...

    async def close(self) -> None: ...
