"""A generation: one answer's tokens, from the first replica that samples some of it to the last.

    WAITING ─▶ SAMPLING ─▶ ENDED
       ▲           │
       └───────────┘  the replica failed, or cut the answer

WAITING   no replica samples. → SAMPLING when the router has chosen one. Raises EngineError when no
          replica has gone on within `patience_s`, or when the answer cannot be continued exactly.
SAMPLING  a replica samples what is left, from the prompt and all tokens so far.
          → ENDED    its answer has ended; or the tokens so far show that the answer had ended.
          → WAITING  the replica failed, or cut the answer.

Invariant: the tokens that `stream` yields are those that passed `AnswerCheck`, each once and in
order. Every replica after the first is asked for exactly `prompt + tokens so far` and for the rest
of `max_tokens`. `versions` covers the tokens without gap or overlap. A `Seam` comes before the
first token that another call of an engine sampled.

What is exact across a seam. The distribution of each token depends on the tokens before it alone,
so temperature, top-p, top-k, min-p, stop token ids and greedy answers continue exactly. A seeded
call continues with a seed that depends on the first seed and on the number of tokens so far: with
the first seed the engine would draw the random numbers again that the first tokens were drawn
with, and the new tokens would not be independent of them. Engines count penalties over the tokens
that one call samples, and begin a grammar at the start of the call, so an answer under either is
not continued. Stop strings that straddle a seam are found in the text (`proxy/serving/answer.py`).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Set
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

import numpy as np

from proxy.engines.answer_check import AnswerCheck
from proxy.engines.protocol import Chunk, Engine, Sampling
from proxy.errors import EngineError, EngineRefusal, RequestError
from proxy.records import FinishReason, Ids, VersionSpan

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
"""Between two rounds in which every healthy replica failed the same answer."""
LOOK_AGAIN_S = 1.0
"""A relay worker that connects again is healthy before the router checks it."""


class Replicas(Protocol):
    """What a generation needs of the router."""

    @property
    def vocab_size(self) -> int: ...

    def choose(
        self, session_id: str, tried: Set[Engine], *, trained: bool, only_healthy: bool
    ) -> Engine | None:
        """A replica that is not in `tried`; None if there is none."""
        ...

    def serves(self, besides: Set[Engine], *, trained: bool) -> bool:
        """Whether a replica outside `besides`, healthy or not, takes such calls."""
        ...

    def failed(self, engine: Engine, error: EngineError) -> str:
        """Takes the replica out until a check succeeds. Returns the id of the line in the log."""
        ...

    def refused(self, engine: Engine, refusal: EngineRefusal) -> RequestError:
        """What the agent is told."""
        ...

    def version_of(self, engine: Engine) -> int:
        """The version of the replica's weights, as far as it is known."""
        ...

    async def released(self, engine: Engine) -> None:
        """To be called when a call of the replica has ended."""
        ...

    async def until_running(self) -> float:
        """Returns when engines are not paused, with the seconds that it waited."""
        ...

    async def until_joined(self, timeout_s: float) -> None:
        """Returns when a replica is added or healthy again, or after `timeout_s`."""
        ...


class GenerationState(Enum):
    """See the module's docstring."""

    WAITING = auto()
    SAMPLING = auto()
    ENDED = auto()


class Cause(Enum):
    """Why a replica did not end an answer."""

    LOST = "lost"
    """It failed, or its connection broke."""
    CUT = "cut"
    """It ended the answer early, and said so."""
    UNUSABLE = "unusable"
    """What it sent cannot be used. It is not asked again for this answer."""


@dataclass(frozen=True, slots=True)
class Seam:
    """From `at_token` on another call samples the answer, on `to_engine`.

    Example: Seam(at_token=12, from_engine="gpu-0", to_engine="gpu-1", cause=Cause.LOST)
    """

    at_token: int
    from_engine: str
    to_engine: str
    cause: Cause


@dataclass(frozen=True, slots=True)
class _Break:
    """A replica's end before the answer's end."""

    cause: Cause
    message: str
    status: int


class _CutShort(EngineError):
    """The replica ended the answer early, as after an abort, and has not failed."""


class Generation:
    """One answer. `stream` it once."""

    def __init__(
        self,
        replicas: Replicas,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        stream: bool,
        patience_s: float,
    ) -> None:
        """`request_id` is `SESSION#TURN`. `stream`: whether tokens are wanted as they are sampled.
        `patience_s`: how long the answer may stand still after a failure."""
        self.state = GenerationState.WAITING
        self._replicas = replicas
        self._prompt = prompt_ids
        self._sampling = sampling
        self._request_id = request_id
        self._session_id = session_id
        self._streamed = stream
        self._patience_s = patience_s
        self._ids: list[int] = []
        self._spans: list[VersionSpan] = []
        self._sampler = ""
        """The replica that sampled the last token."""
        self._calls = 0
        self._breaks: list[_Break] = []
        """Those since the last token. The four below count from it, too."""
        self._tried: set[Engine] = set()
        self._rounds = 0
        self._deadline: float | None = None
        self._unusable: set[Engine] = set()
        """Replicas that are not asked again for this answer."""

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Over all tokens so far. A call that ended has the engine's own spans; a call that broke
        has those that the proxy knew while it sampled (`Replicas.version_of`)."""
        return tuple(self._spans)

    async def stream(self) -> AsyncGenerator[Chunk | Seam, None]:
        """The chunks, the one with the finish reason last, and the seams between them.

        Raises:
            EngineError: 502 when no engine's answer can be used; 503 when no replica went on within
                `patience_s`, or the answer cannot be continued exactly. Names no address.
            RequestError: the engine refuses the call's parameters; or the session trains and every
                engine is text-only.
        """
        while self.state is not GenerationState.ENDED:
            engine = await self._next()
            self.state = GenerationState.SAMPLING
            async with aclosing(self._sample(engine)) as pieces:
                async for piece in pieces:
                    yield piece
            if self.state is GenerationState.SAMPLING:
                self.state = GenerationState.WAITING
                end = self._end_in_tokens()
                if end is not None:
                    self.state = GenerationState.ENDED
                    yield Chunk([], [], finish_reason=end)

    async def _next(self) -> Engine:
        """Raises what ends the generation."""
        if self._ids and not _continuable(self._sampling):
            raise self._failure(
                "an answer with a grammar or a penalty cannot be continued exactly; try again"
            )
        while True:
            paused_s = await self._replicas.until_running()
            if self._deadline is not None:
                self._deadline += paused_s
            engine = self._replicas.choose(
                self._session_id,
                self._tried | self._unusable,
                trained=self._sampling.trained,
                only_healthy=bool(self._breaks),
            )
            if engine is not None:
                self._tried.add(engine)
                self._calls += 1
                return engine
            self._refuse_if_hopeless()
            await self._wait()

    def _refuse_if_hopeless(self) -> None:
        """Raises what ends the generation where no wait can help."""
        if self._replicas.serves(self._unusable, trained=self._sampling.trained):
            return
        if self._breaks and self._breaks[-1].cause is Cause.UNUSABLE:
            raise self._failure("try again")
        if self._replicas.serves(self._unusable, trained=False):
            raise RequestError(
                "this session trains, and every engine is text-only: create the session with kind"
                " eval, or add an engine that reports token ids"
            )

    async def _wait(self) -> None:
        """For a replica that can be asked. Raises EngineError when patience has ended."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._patience_s
        left_s = self._deadline - now
        if left_s <= 0:
            raise self._failure(
                f"no engine took the answer up within {self._patience_s:g} s"
                " (limits.engine_patience_s); try again"
            )
        if not self._tried:
            await self._replicas.until_joined(min(left_s, LOOK_AGAIN_S))
            return
        backoff_s = min(FIRST_BACKOFF_S * 2**self._rounds, MAX_BACKOFF_S)
        await asyncio.sleep(min(backoff_s, left_s))
        self._tried.clear()
        self._rounds += 1

    async def _sample(self, engine: Engine) -> AsyncGenerator[Chunk | Seam, None]:
        """What one call of `engine` adds."""
        begun, check = len(self._ids), self._check_of(engine)
        try:
            async with aclosing(self._asked(engine)) as chunks:
                async for chunk in chunks:
                    for seam in self._take(engine, check.take(chunk)):
                        yield seam
                    if chunk.finish_reason is FinishReason.CUT:
                        if chunk.ids:
                            yield replace(chunk, finish_reason=None)
                        raise _CutShort("the engine cut this generation short")
                    if chunk.finish_reason is not None:
                        self._end(chunk.versions, begun)
                    yield chunk
            if self.state is not GenerationState.ENDED:
                raise EngineError("the engine ended its answer without a finish reason", status=502)
        except _CutShort as cut:
            self._breaks.append(_Break(Cause.CUT, cut.message, cut.status))
        except EngineError as error:
            self._lose(engine, error)
        except EngineRefusal as refusal:
            if not self._ids:
                raise self._replicas.refused(engine, refusal) from refusal
            self._lose(engine, EngineError(refusal.message, status=502))
        finally:
            await self._replicas.released(engine)

    def _asked(self, engine: Engine) -> AsyncGenerator[Chunk, None]:
        prompt, number = self._prompt, self._calls - 1
        if self._ids:
            prompt = np.concatenate([prompt, np.array(self._ids, np.int32)])
        # An engine may still run the call that broke, under its own id.
        request_id = f"{self._request_id}.{number}" if number else self._request_id
        return engine.generate(prompt, self._left, request_id=request_id, stream=self._streamed)

    @property
    def _left(self) -> Sampling:
        sampling, done = self._sampling, len(self._ids)
        if not done:
            return sampling
        seed = None if sampling.seed is None else seed_after(sampling.seed, done)
        return replace(sampling, max_tokens=sampling.max_tokens - done, seed=seed)

    def _check_of(self, engine: Engine) -> AnswerCheck:
        return AnswerCheck(
            self._left, vocab_size=self._replicas.vocab_size, text_only=engine.info.text_only
        )

    def _take(self, engine: Engine, chunk: Chunk) -> list[Seam]:
        """The seam before the chunk's tokens, where there is one."""
        if not chunk.ids:
            return []
        done, name, seams = len(self._ids), engine.info.name, []
        if self._breaks:
            if done:
                seams = [Seam(done, self._sampler, name, self._breaks[0].cause)]
            self._breaks.clear()
        self._tried, self._rounds, self._deadline, self._sampler = {engine}, 0, None, name
        self._ids += chunk.ids
        self._add_span(VersionSpan(self._replicas.version_of(engine), done, len(self._ids)))
        return seams

    def _end(self, spans: tuple[VersionSpan, ...], begun: int) -> None:
        """`spans`: as the engine reports them over its call, which began after `begun` tokens."""
        self.state = GenerationState.ENDED
        if not spans:
            return
        known = [s for s in self._spans if s.start < begun]
        self._spans = [replace(s, end=min(s.end, begun)) for s in known]
        for span in spans:
            self._add_span(replace(span, start=span.start + begun, end=span.end + begun))

    def _add_span(self, span: VersionSpan) -> None:
        if self._spans and self._spans[-1].version == span.version:
            self._spans[-1] = replace(self._spans[-1], end=span.end)
        else:
            self._spans.append(span)

    def _end_in_tokens(self) -> FinishReason | None:
        """Why the tokens of a call that broke are a whole answer; None if they are not.

        Raises EngineError where they are one of a replica that went on after it.
        """
        end = None
        if len(self._ids) == self._sampling.max_tokens:
            end = FinishReason.LENGTH
        if self._ids and self._ids[-1] in self._sampling.stop_token_ids:
            end = FinishReason.STOP
        if end is not None and self._breaks[-1].cause is Cause.UNUSABLE:
            raise self._failure("try again")
        return end

    def _lose(self, engine: Engine, error: EngineError) -> None:
        failure_id = self._replicas.failed(engine, error)
        unusable = error.status == 502
        if unusable:
            self._unusable.add(engine)
        cause = Cause.UNUSABLE if unusable else Cause.LOST
        message = f"the engine failed (id {failure_id})"
        self._breaks.append(_Break(cause, message, error.status))

    def _failure(self, words: str) -> EngineError:
        """The error that ends the generation."""
        if not self._breaks:
            return EngineError(f"no engine can be asked; {words}")
        last = self._breaks[-1]
        return EngineError(f"{last.message}; {words}", status=last.status)


def seed_after(seed: int, tokens: int) -> int:
    """The seed of a call that continues an answer of `tokens` tokens, in `[0, 2**31)`."""
    return zlib.crc32(f"{seed}:{tokens}".encode()) >> 1


def _continuable(sampling: Sampling) -> bool:
    """Whether another call can continue an answer exactly; see the module's docstring."""
    return (
        sampling.structured is None
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
    )
