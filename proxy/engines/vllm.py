"""The client of vLLM's token-in/token-out route, `POST /inference/v1/generate`.

vLLM needs `--enable-scale-out` for this route. A server with the binary route (`vllm_frames.py`),
such as one that we start, gets calls by that, with the same parameters and answers. Invariant:
every id has its log-probability under the sampled distribution (the server runs with
`--logprobs-mode processed_logprobs`); a missing one is an error. The finish
reason `abort` becomes CUT.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import starmap
from typing import Any, Generic, TypeVar

import msgspec
import orjson

from proxy.engines.http_engine import CONTROL_TIMEOUT_S, Answer, Choice, HttpEngine, Received
from proxy.engines.prompt_json import PromptJson
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm_metrics import METRICS, cache_tokens, load_details
from proxy.errors import EngineError
from proxy.extras.binary_route.client import MAX_PROMPT_TOKENS, FramesClient, Ranked
from proxy.extras.binary_route.frames import MISSING_LOGPROB, CallEnd
from proxy.records import Ids, RoutedExperts, VersionSpan
from proxy.records.alternatives import MAX_ALTERNATIVES
from proxy.records.routed_experts import load, load_text

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a request of this route."""
METRICS_TIMEOUT_S = 5.0
"""Short, because sampling does not depend on the metrics, and health checks wait for them."""


class _Alternative(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _RankedToken(_Token, gc=False):
    top_logprobs: list[_Alternative] = []


T = TypeVar("T", bound=_Token)
D = TypeVar("D", bytes, str)


class _Logprobs(msgspec.Struct, Generic[T], gc=False):
    content: list[T] | None = None


class _Version(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(Choice, Generic[T], gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs[T] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Version] | None = None
    routed_experts: str | None = None


class _Answer(Answer, Generic[T], gc=False):
    choices: list[_Choice[T]] = msgspec.field(default_factory=list)


class VllmEngine(HttpEngine[_Answer[Any]]):
    """Implements `proxy.engines.protocol.Engine`."""

    route = GENERATE
    _decoder = msgspec.json.Decoder(_Answer[_Token])
    """Passes over alternatives, which take half the time of decoding an answer."""
    _ranked_decoder = msgspec.json.Decoder(_Answer[_RankedToken])

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(url, **more)
        self._prompts = PromptJson()
        self._frames = FramesClient(
            self._upstream.address, stall_timeout_s=self._upstream.stall_timeout_s
        )
        self._has_frames: bool | None = None
        """Whether the server has the binary route; None: not known since it has last failed."""
        self._info.adapters = True
        self._metrics_read = False
        self._sends_load = False

    async def abort(self, request_id: str) -> None:
        body = orjson.dumps({"request_ids": [REQUEST_PREFIX + request_id]})
        await self._upstream.post(ABORT, body, timeout_s=CONTROL_TIMEOUT_S)

    def forget(self, session_id: str) -> None:
        self._prompts.forget(session_id)
        self._frames.forget(session_id)

    async def check(self) -> None:
        try:
            await super().check()
        except EngineError:
            self._has_frames = None
            raise

    async def close(self) -> None:
        await self._frames.close()
        await super().close()

    async def _learn(self) -> None:
        read, self._metrics_read = self._metrics_read, False  # a check that fails reads them again
        await super()._learn()
        self._metrics_read = read or await self._read_metrics()
        self._info.version = self._version(await self._weight_label("/weight_info"))
        if self._has_frames is None:
            with contextlib.suppress(EngineError):  # the other routes work
                self._has_frames = await self._frames.connect()

    async def _read_metrics(self) -> bool:
        """Whether the engine has sent metrics that do not change: it has never sent its load. An
        engine without metrics samples as any other does, and the size of its cache stays unknown.
        A size that is known stays known if a page lacks it."""
        try:
            metrics = await self._upstream.text(METRICS, timeout_s=METRICS_TIMEOUT_S)
        except EngineError:
            self._info.details = {}
            return False
        self._info.cache_tokens = cache_tokens(metrics) or self._info.cache_tokens
        self._info.details = load_details(metrics)
        self._sends_load = self._sends_load or bool(self._info.details)
        return not self._sends_load

    async def _sample(
        self,
        prompt_ids: Ids,
        received: Received,
        request_id: str,
        cache_salt: str | None,
        stream: bool,
    ) -> None:
        if self._has_frames and len(prompt_ids) <= MAX_PROMPT_TOKENS:
            self._has_frames = await self._frames.connect()
        if not self._has_frames or len(prompt_ids) > MAX_PROMPT_TOKENS:
            return await super()._sample(prompt_ids, received, request_id, cache_salt, stream)
        received.cancels_itself = True
        request = self._request(received.sampling, request_id, cache_salt, stream)
        await self._frames.sample(prompt_ids, request, partial(self._take, received))

    def _take(
        self,
        received: Received,
        ids: list[int],
        logprobs: list[float],
        ranked: Ranked | None,
        end: CallEnd | None,
    ) -> None:
        """Passes on what the binary route has sent. Raises EngineError."""
        sampling, chunk = received.sampling, Chunk(ids, logprobs)
        self._check_logprobs(logprobs)
        if sampling.alternatives or sampling.top_logprobs:
            self._add_ranked(chunk, ranked or [[] for _ in ids], sampling)
        if end is not None and end.error is None:
            chunk.finish_reason = self._finish_reason(end.finish or "")
            chunk.stop_reason = end.stop
            chunk.versions = self._versions(starmap(_Version, end.versions))
            if sampling.experts_from is not None and end.routed_experts is not None:
                chunk.routed_experts = self._experts(load, end.routed_experts)
        if ids or chunk.finish_reason is not None:
            received.chunk(chunk)
        if end is not None and end.error is not None:
            raise self._upstream.refusal(end.code, end.error)

    def _body(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        request_id: str,
        cache_salt: str | None,
        stream: bool,
    ) -> bytes:
        body = self._request(sampling, request_id, cache_salt, stream)
        ids = self._prompts.dump(prompt_ids, request_id.rpartition("#")[0])
        return b'{"token_ids":%b,%b' % (ids, orjson.dumps(body)[1:])

    def _request(
        self, sampling: Sampling, request_id: str, cache_salt: str | None, stream: bool
    ) -> dict[str, Any]:
        """The fields of a generation request besides the ids."""
        body = {
            "request_id": request_id,
            "sampling_params": sampling_params(sampling),
            "stream": stream,
        }
        if (model := sampling.adapter or self._info.model) is not None:
            body["model"] = model
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return body

    def _decoder_for(self, sampling: Sampling) -> msgspec.json.Decoder[_Answer[Any]]:
        ranked = sampling.alternatives or sampling.top_logprobs
        return self._ranked_decoder if ranked else self._decoder

    def _chunks(
        self, answers: Sequence[_Answer[Any]], sampling: Sampling, given: int
    ) -> Iterable[Chunk]:
        choices = [choice for answer in answers for choice in answer.choices]
        return [self._chunk(choices, sampling)] if choices else []

    def _chunk(self, choices: list[_Choice[Any]], sampling: Sampling) -> Chunk:
        """One chunk from the choices of events that came together (all are choice 0)."""
        chunk = Chunk([], [])
        tokens: list[Any] = []
        for choice in choices:
            if chunk.finish_reason is not None:
                raise self._upstream.fault("sent an event after its finish reason")
            chunk.ids += choice.token_ids or ()
            tokens += (choice.logprobs and choice.logprobs.content) or ()
            if choice.finish_reason is not None:
                chunk.finish_reason = self._finish_reason(choice.finish_reason)
                chunk.stop_reason = choice.stop_reason
                chunk.versions = self._versions(choice.weight_versions or ())
                if sampling.experts_from is not None and choice.routed_experts is not None:
                    chunk.routed_experts = self._experts(load_text, choice.routed_experts)
        chunk.logprobs = [token.logprob for token in tokens]
        self._check(chunk, tokens)
        if sampling.alternatives or sampling.top_logprobs:
            tops = [[(a.token_id, a.logprob) for a in token.top_logprobs] for token in tokens]
            self._add_ranked(chunk, tops, sampling)
        return chunk

    def _add_ranked(self, chunk: Chunk, tops: Ranked, sampling: Sampling) -> None:
        chunk.alternatives = self._recorded(tops, sampling)
        if sampling.top_logprobs:
            chunk.top_logprobs = [top[: sampling.top_logprobs] for top in tops]

    def _versions(self, spans: Iterable[_Version]) -> tuple[VersionSpan, ...]:
        versions = tuple(VersionSpan(self._version(s.version), s.start, s.end) for s in spans)
        if versions:
            self._info.version = versions[-1].version
        return versions

    def _experts(self, load: Callable[[D], RoutedExperts | None], data: D) -> RoutedExperts | None:
        try:
            return load(data)
        except ValueError as error:
            raise self._upstream.fault(f"sent unreadable routed experts: {error}") from error

    def _check(self, chunk: Chunk, tokens: list[_Token]) -> None:
        if chunk.ids != [token.token_id for token in tokens]:
            raise self._upstream.fault(
                f"sent {len(chunk.ids)} tokens and log-probabilities of {len(tokens)} tokens, or of"
                " different ones"
            )
        self._check_logprobs(chunk.logprobs)

    def _check_logprobs(self, logprobs: list[float]) -> None:
        if logprobs and min(logprobs) <= MISSING_LOGPROB:
            raise self._upstream.fault("sent a token without its log-probability")


def sampling_params(s: Sampling) -> dict[str, Any]:
    """vLLM's SamplingParams. Neutral values are sent too, because generation_config.json may have
    others."""
    params: dict[str, Any] = {
        "max_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
        "logprobs": _logprobs(s),
        "detokenize": bool(s.stop),
    }
    if s.seed is not None:
        params["seed"] = s.seed
    if s.stop:
        params["stop"] = list(s.stop)
    if s.stop_token_ids:
        params["stop_token_ids"] = list(s.stop_token_ids)
    if s.structured is not None:
        params["structured_outputs"] = s.structured
    if s.experts_from is not None:
        params["routed_experts_prompt_start"] = s.experts_from
    return params


def _logprobs(s: Sampling) -> int:
    """The number of tokens to request at each position. vLLM puts the sampled one first, so that
    one more is needed where it is not among the most probable ones."""
    if s.alternatives <= s.top_logprobs:
        return s.top_logprobs
    return min(s.alternatives + 1, MAX_ALTERNATIVES)
