"""A generation: one answer's tokens, from the first replica that samples some of it to the last.

    WAITING ─▶ SAMPLING ─▶ ENDED
       ▲           │
       └───────────┘  the replica failed, or cut the answer

WAITING   no replica samples. → SAMPLING when the router has chosen one. Raises EngineError if no
          replica continues the answer within `patience_s`, or none could continue it exactly.
SAMPLING  a replica samples the rest of the answer, given the prompt and all tokens so far.
          → ENDED    the answer is complete, by its finish reason or by its last token.
          → WAITING  the replica failed, or cut the answer.

Invariant: the tokens that `sample` passes on are those that passed `AnswerCheck`, each once and in
order. Every replica after the first is asked for exactly `prompt + tokens so far` and for the rest
of `max_tokens`. `versions` covers the tokens without gap or overlap. A `Seam` comes before the
first token of each further engine call.

What continues exactly across a seam: temperature, top-p, top-k, min-p, stop token ids and greedy
answers, because the distribution of a token depends only on the tokens before it. A seeded call
continues with a seed that depends on the original seed and on the number of tokens so far. With the
original seed, the engine would reuse the random numbers of the first tokens, and the new tokens
would not be independent of them; one that draws them by position gets that seed, too
(`Sampling.first_seed`). An answer with penalties or a grammar is not continued, because engines
count penalties from the start of a call and begin the grammar there. Stop strings that straddle a
seam are found in the text (`proxy/serving/answer.py`).

`Seam` is a point at which one replica stopped sampling and another call continued; `Replicas` is
what a generation needs of the engines as a whole, which the router implements.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import structs

from proxy.engines.answer_check import AnswerCheck
from proxy.engines.protocol import Chunk, Engine, Sampling, Take
from proxy.errors import EngineError, EngineRefusal, MissingAdapter, RequestError
from proxy.records import FinishReason, Ids, RoutedExperts, VersionSpan
from proxy.routing.blame import Attempt, Blame, Suspicion
from proxy.routing.policies import BASE, Policies


class Cause(Enum):
    """Why a replica did not end an answer."""

    LOST = "lost"
    """The replica failed, or its connection broke."""
    UPDATED = "updated"
    """The call was cut because the policy has a new version, which samples the rest."""
    CUT = "cut"
    """The replica ended the answer early and reported it, as after an abort."""
    UNUSABLE = "unusable"
    """Its answer was invalid. The replica is not called again for this answer."""


@dataclass(frozen=True, slots=True)
class Seam:
    """The point in an answer from which another engine call samples it.

    Example: Seam(at_token=12, from_engine="gpu-0", to_engine="gpu-1", cause=Cause.LOST)
    """

    at_token: int
    from_engine: str
    to_engine: str
    cause: Cause


class Replicas(Protocol):
    """The part of the router that a generation uses."""

    @property
    def patience_s(self) -> float:
        """How long an answer may stand still after a failure."""
        ...

    @property
    def policies(self) -> Policies:
        """The policies, each with the adapter that samples for it now."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def blame(self) -> Blame:
        """Which calls are suspected of having taken an engine down."""
        ...

    def without_images(self) -> Set[Engine]:
        """The replicas that sample no prompts with images."""
        ...

    def closed_to(self, suspicion: Suspicion) -> Set[Engine]:
        """The replicas that are reserved for other calls which are suspected."""
        ...

    def choose(
        self,
        session_id: str,
        tried: Set[Engine],
        *,
        trained: bool,
        adapted: bool,
        only_healthy: bool,
    ) -> Engine | None:
        """A replica that is not in `tried`; None if there is none. `adapted`: it must serve
        adapters."""
        ...

    def serves(self, besides: Set[Engine], *, trained: bool, adapted: bool = False) -> bool:
        """Whether any replica that is not in `besides` takes such calls, healthy or not."""
        ...

    def failed(self, engine: Engine, error: EngineError, attempt: Attempt) -> str:
        """Marks the replica as unhealthy until a check succeeds, unless it lacks only the call's
        adapter. Returns the log line's id."""
        ...

    def refused(self, engine: Engine, refusal: EngineRefusal) -> RequestError:
        """The error that the agent gets."""
        ...

    def version_of(self, engine: Engine) -> int:
        """The version of the replica's weights, as far as it is known."""
        ...

    def is_removed(self, engine: Engine) -> bool:
        """Whether the replica was removed while it had calls in flight."""
        ...

    async def released(self, engine: Engine) -> None:
        """To be called when a call of a removed replica has ended."""
        ...

    @property
    def paused(self) -> bool: ...

    async def until_running(self) -> float:
        """Waits while engines are paused. Returns the seconds waited."""
        ...

    async def until_joined(self, timeout_s: float) -> None:
        """Returns when a replica is added or healthy again, or after `timeout_s`."""
        ...


FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
"""Longest wait between two rounds in which every healthy replica failed the same answer."""
NO_FINISH = "the engine ended its answer without a finish reason"
LOOK_AGAIN_S = 1.0
"""Longest wait for news from the router, because a relay worker that reconnects is healthy before
the router's next check."""


class GenerationState(Enum):
    """See the module's docstring."""

    WAITING = auto()
    SAMPLING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class _Break:
    """A replica's end before the answer's end."""

    cause: Cause
    message: str
    status: int


@dataclass(frozen=True, slots=True)
class _EngineCall:
    """One replica's call, and who receives what it samples."""

    engine: Engine
    begun: int
    """Number of tokens that earlier calls sampled."""
    check: AnswerCheck
    attempt: Attempt
    take: Take
    resumed: Callable[[Seam], None]


class _CutShort(EngineError):
    """The replica ended the answer early, as after an abort, and has not failed."""


class Generation:
    """One answer. Call `sample` only once."""

    def __init__(
        self,
        replicas: Replicas,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        stream: bool = True,
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
        self._patience_s = replicas.patience_s
        self._ids: list[int] = []
        self._starts: list[tuple[int, int]] = []
        """Of each version span: its version and first token."""
        self.routed_experts: RoutedExperts | None = None
        """The rows that the last call reported, which also are of the tokens that earlier calls
        sampled: it computed them again. None if the call broke."""
        self._suspicion = Suspicion(prompt_ids)
        self._served = BASE
        """The version of the policy that the current call samples from."""
        self._sampler = ""
        """The replica that sampled the last token."""
        self._calls = 0
        self._breaks: list[_Break] = []
        """The breaks since the last token. The next four fields are reset by each token, too."""
        self._tried: set[Engine] = set()
        self._rounds = 0
        self._deadline: float | None = None
        self._unusable: set[Engine] = set()
        """Replicas that are not called again for this answer."""

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The versions of all tokens so far. For a call that ended, they are the engine's own; for
        one that broke, those that the proxy assumed while it ran (`Replicas.version_of`)."""
        ends = [*(start for _, start in self._starts[1:]), len(self._ids)]
        return tuple(
            VersionSpan(version, start, end)
            for (version, start), end in zip(self._starts, ends, strict=False)
        )

    @property
    def engine(self) -> str:
        """The name of the engine that sampled the last token; empty before the first one."""
        return self._sampler

    def keep(self, count: int) -> None:
        """Drops the tokens after the first `count`: the answer has ended there."""
        if count < len(self._ids):
            del self._ids[count:]
            self._starts = [known for known in self._starts if known[1] < count]
            self.routed_experts = None

    async def sample(self, take: Take, resumed: Callable[[Seam], None]) -> None:
        """Passes the chunks to `take`, the one with the finish reason last, and the seams between
        them to `resumed`. Raises what these raise, after it has aborted the engine's call.

        Raises:
            EngineError: 502 if no engine gives a valid answer; 503 if no replica continues it
                within `patience_s`, or it cannot be continued exactly. Names no engine's address.
            RequestError: the engine refuses the call's parameters; the session trains and every
                engine is text-only; or the request took engines down (`blame.py`).
        """
        while self.state is not GenerationState.ENDED:
            engine = await self._next()
            self.state = GenerationState.SAMPLING
            try:
                with Attempt(self._replicas.blame, engine, self._suspicion) as attempt:
                    check = self._check_of(engine)
                    call = _EngineCall(engine, len(self._ids), check, attempt, take, resumed)
                    await self._call(call)
            finally:
                if self._replicas.is_removed(engine):
                    await self._replicas.released(engine)
            if self.state is GenerationState.SAMPLING:
                self.state = GenerationState.WAITING
                end = self._end_in_tokens()
                if end is not None:
                    self.state = GenerationState.ENDED
                    take(Chunk([], [], finish_reason=end))

    async def _call(self, call: _EngineCall) -> None:
        engine = call.engine
        try:
            with self._movable(engine):
                await self._ask(engine, partial(self._take, call))
            if self.state is GenerationState.SAMPLING:
                raise EngineError(NO_FINISH, status=502)
        except (EngineError, EngineRefusal) as error:
            self._broken(call, error)

    async def _next(self) -> Engine:
        """The replica to call next. Raises the error that ends the generation if there is none."""
        if self._ids and not _continuable(self._sampling):
            raise self._failure(
                "an answer with a grammar or a penalty cannot be continued exactly; try again"
            )
        blame, suspicion = self._replicas.blame, self._suspicion
        while True:
            await blame.judged(suspicion)
            while self._replicas.paused:  # again, if the next pause began before this task woke
                paused_s = await self._replicas.until_running()
                if self._deadline is not None:
                    self._deadline += paused_s
            served, engine = self._replicas.policies.current(self._sampling.policy), None
            closed = self._replicas.closed_to(suspicion)
            has_images = self._sampling.images is not None
            blind = self._replicas.without_images() if has_images else frozenset[Engine]()
            if served is not None:
                engine = self._replicas.choose(
                    self._session_id,
                    self._tried | self._unusable | closed | blind,
                    trained=self._sampling.trained,
                    adapted=served is not BASE,
                    only_healthy=bool(self._breaks or closed),
                )
            if engine is not None and suspicion.suspected and engine.info.healthy:
                if not await self._is_alone_at(engine):
                    continue
            elif engine is None and closed:
                await self._until_open()
                continue
            if served is not None and engine is not None:
                self._served = served
                self._tried.add(engine)
                self._calls += 1
                return engine
            self._refuse_if_hopeless()
            await self._wait()

    async def _is_alone_at(self, engine: Engine) -> bool:
        """Waits until this suspect may begin there. False: another replica is to be chosen."""
        blame, loop = self._replicas.blame, asyncio.get_running_loop()
        began = loop.time()
        alone = await blame.alone(engine, self._suspicion)
        if alone and self._replicas.paused:
            blame.give_up(engine, self._suspicion)
            alone = False
        if self._deadline is not None:
            self._deadline += loop.time() - began
        return alone

    async def _until_open(self) -> None:
        """Waits until a replica that is reserved for a suspect is free."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self._replicas.blame.changed(LOOK_AGAIN_S)
        if self._deadline is not None:
            self._deadline += loop.time() - began

    def _refuse_if_hopeless(self) -> None:
        """Raises the error that ends the generation if waiting cannot help."""
        trained, adapted = self._sampling.trained, bool(self._sampling.policy)
        if self._replicas.serves(self._unusable, trained=trained, adapted=adapted):
            return
        if self._breaks and self._breaks[-1].cause is Cause.UNUSABLE:
            raise self._failure("try again")
        if adapted and self._replicas.serves(self._unusable, trained=trained):
            raise RequestError(
                f"this session samples from the policy {self._sampling.policy!r}, and no engine "
                "serves adapters: add a vLLM engine"
            )
        if self._replicas.serves(self._unusable, trained=False):
            raise RequestError(
                "this session trains, and every engine is text-only: create the session with kind"
                " eval, or add an engine that reports token ids"
            )

    async def _wait(self) -> None:
        """Waits before the next choice. Raises EngineError after `patience_s`."""
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._patience_s
        left_s = self._deadline - now
        policy = self._sampling.policy
        if left_s <= 0 and self._replicas.policies.current(policy) is None:
            raise self._failure(
                f"the policy {policy!r} has no version yet (PUT /policies/{policy}/version)"
            )
        if left_s <= 0:
            raise self._failure(
                f"no engine continued the answer within {self._patience_s:g} s"
                " (limits.engine_patience_s); try again"
            )
        if not self._tried:
            await self._replicas.until_joined(min(left_s, LOOK_AGAIN_S))
            return
        backoff_s = min(FIRST_BACKOFF_S * 2**self._rounds, MAX_BACKOFF_S)
        await asyncio.sleep(min(backoff_s, left_s))
        self._tried.clear()
        self._rounds += 1

    async def _ask(self, engine: Engine, take: Take) -> None:
        prompt = self._prompt
        if self._ids:
            prompt = np.concatenate([prompt, np.array(self._ids, np.int32)])
        await engine.generate(
            prompt,
            self._left,
            take,
            request_id=self._call_id,
            stream=self._streamed or self._suspicion.suspected,  # its first token acquits it
        )

    @property
    def _call_id(self) -> str:
        """The request id of the current call. The engine may still run a call that broke, so each
        call has its own."""
        number = self._calls - 1
        return f"{self._request_id}.{number}" if number else self._request_id

    def _movable(self, engine: Engine) -> AbstractContextManager[None]:
        """A context in which the call is cut if its policy gets a new version."""
        if self._served is BASE or not _continuable(self._sampling):
            return nullcontext()
        return self._replicas.policies.running(self._served, engine, self._call_id)

    @property
    def _left(self) -> Sampling:
        sampling, done = self._sampling, len(self._ids)
        if self._served is not BASE:
            sampling = structs.replace(sampling, adapter=self._served.adapter)
        if not done:
            return sampling
        seed = None if sampling.seed is None else seed_after(sampling.seed, done)
        return structs.replace(
            sampling, max_tokens=sampling.max_tokens - done, seed=seed, first_seed=sampling.seed
        )

    def _check_of(self, engine: Engine) -> AnswerCheck:
        return AnswerCheck(
            self._left,
            vocab_size=self._replicas.vocab_size,
            text_only=engine.info.text_only,
            prompt_tokens=len(self._prompt) + len(self._ids),
        )

    def _take(self, call: _EngineCall, chunk: Chunk) -> None:
        """Passes a chunk of `call` on, after the seam before it if there is one."""
        call.check.take(chunk)
        if chunk.ids:
            self._replicas.blame.sampled(call.engine, call.attempt)
            self._add_tokens(call, chunk.ids)
        if chunk.finish_reason is None:
            call.take(chunk)
            return
        if chunk.finish_reason is FinishReason.CUT:
            if chunk.ids:
                call.take(structs.replace(chunk, finish_reason=None))
            raise _CutShort("the engine cut this generation short")
        self._end(chunk.versions, call.begun)
        self.routed_experts = chunk.routed_experts
        call.take(chunk)

    def _add_tokens(self, call: _EngineCall, ids: list[int]) -> None:
        done, engine = len(self._ids), call.engine
        if done == call.begun:
            self._continues(call)
        self._ids += ids
        adapted = self._served is not BASE
        version = self._served.version if adapted else self._replicas.version_of(engine)
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, done))

    def _continues(self, call: _EngineCall) -> None:
        """Notes that `call` gives its first tokens, and reports the seam before them."""
        name = call.engine.info.name
        if self._breaks and call.begun:
            call.resumed(Seam(call.begun, self._sampler, name, self._breaks[0].cause))
        self._breaks.clear()
        self._tried, self._rounds, self._deadline = {call.engine}, 0, None
        self._sampler = name

    def _end(self, spans: tuple[VersionSpan, ...], begun: int) -> None:
        """`spans` are the engine's own for its call, which began after `begun` tokens. They are of
        the engine's weights, without the adapter."""
        self.state = GenerationState.ENDED
        if not spans or self._served is not BASE:
            return
        self._starts = [known for known in self._starts if known[1] < begun]
        for span in spans:
            if not self._starts or self._starts[-1][0] != span.version:
                self._starts.append((span.version, begun + span.start))

    def _end_in_tokens(self) -> FinishReason | None:
        """The finish reason if the tokens of a broken call are a complete answer, else None.

        Raises EngineError if the answer is complete but the replica sent more.
        """
        end = None
        if len(self._ids) == self._sampling.max_tokens:
            end = FinishReason.LENGTH
        if self._ids and self._ids[-1] in self._sampling.stop_token_ids:
            end = FinishReason.STOP
        if end is not None and self._breaks[-1].cause is Cause.UNUSABLE:
            raise self._failure("try again")
        return end

    def _broken(self, call: _EngineCall, error: EngineError | EngineRefusal) -> None:
        """Notes why a call ended early. Raises RequestError if the engine refused the first."""
        engine = call.engine
        if isinstance(error, _CutShort):
            cause = Cause.CUT
            if self._served != self._replicas.policies.current(self._sampling.policy):
                cause = Cause.UPDATED
                self._tried.discard(engine)
            self._breaks.append(_Break(cause, error.message, error.status))
        elif isinstance(error, EngineError):
            self._lose(call, error)
        elif self._ids:
            self._lose(call, EngineError(error.message, status=502))
        else:
            raise self._replicas.refused(engine, error) from error

    def _lose(self, call: _EngineCall, error: EngineError) -> None:
        engine = call.engine
        failure_id = self._replicas.failed(engine, error, call.attempt)
        unusable = error.status == 502
        if unusable:
            self._unusable.add(engine)
        cause = Cause.UNUSABLE if unusable else Cause.LOST
        what = "failed"
        if isinstance(error, MissingAdapter):
            what = f"does not have this version of the policy {self._sampling.policy!r}"
        self._breaks.append(_Break(cause, f"the engine {what} (id {failure_id})", error.status))

    def _failure(self, words: str) -> EngineError:
        """The error that ends the generation."""
        if not self._breaks:
            return EngineError(f"no engine is available; {words}")
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
