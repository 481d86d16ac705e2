"""The client of vLLM's token-in/token-out route, `POST /inference/v1/generate`.

vLLM needs `--enable-scale-out` for this route. A server with the binary route
(`binary_route/vllm.py`), such as one that we start, gets calls by that, with the same parameters
and answers. Invariant: every id has its log-probability under the sampled distribution (the server
runs with `--logprobs-mode processed_logprobs`); a missing one is an error. The finish reason
`abort` becomes CUT.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import msgspec
import orjson
from msgspec.structs import replace

from proxy.config import EngineConfig
from proxy.engines.http_engine import (
    CONTROL_TIMEOUT_S,
    Answer,
    Choice,
    EngineCall,
    HttpEngine,
    Received,
    ReportedFailure,
    UnusableAnswer,
    answer_in,
    connection,
    finish_reason,
    recorded,
    send,
    weight_version,
)
from proxy.engines.images import (
    BRINGING_AT_ONCE,
    FEW,
    PROBE,
    RENDER,
    Items,
    brought,
    check_echo,
    features,
    read_prepared,
    render_request,
)
from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.engines.prompt_json import PromptJson
from proxy.engines.protocol import Chunk, EngineInfo, PreparedImage, PromptImages, Sampling
from proxy.engines.upstream import ServerError, Upstream
from proxy.engines.vllm_metrics import METRICS, cache_tokens, load_details
from proxy.engines.vocabulary import KnownWords
from proxy.errors import EngineError, EngineRefusal
from proxy.extra_registry import BINARY_ROUTE_CLIENT
from proxy.records import Ids, RoutedExperts, VersionSpan
from proxy.records.alternatives import MAX_ALTERNATIVES
from proxy.records.images import engine_ids
from proxy.records.routed_experts import load, load_text
from proxy.settings.plugins import load_plugin

if TYPE_CHECKING:
    from proxy.rendering.rendering import Rendering

_log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
FIRST_SEED = "first_seed"
"""Name of `Sampling.first_seed` among vLLM's `extra_args`."""
REQUEST_PREFIX = "generate-tokens-"
"""vLLM puts this before the id of a request of this route."""
MAX_HAD = 100_000
"""Images that an engine is known to have had; vLLM's cache of 4 GiB holds fewer."""
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


class WeightSpan(msgspec.Struct, gc=False):
    """Which weights sampled the tokens from `start` to `end` of an answer."""

    version: str
    start: int
    end: int


class _Choice(Choice, Generic[T], gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs[T] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None


class _Answer(Answer, Generic[T], gc=False):
    choices: list[_Choice[T]] = msgspec.field(default_factory=list)
    mm_placeholders: dict[str, Any] | None = None
    """Where the engine has images, in its first event or its whole answer."""


_DECODER = msgspec.json.Decoder(_Answer[_Token])
"""Passes over alternatives, which take half the time of decoding an answer."""
_RANKED_DECODER = msgspec.json.Decoder(_Answer[_RankedToken])


Ranked = list[list[tuple[int, float]]]
"""For each token the ids and log-probabilities of the sampled one and the most probable ones."""


class CallEnd(Protocol):
    """The end of a call of the binary route: either `finish` or `error` is set."""

    finish: str | None
    stop: int | str | None
    versions: list[tuple[str, int, int]]
    routed_experts: bytes | None
    error: str | None
    code: int


class BinaryRoute(Protocol):
    """The client of a route that has the same requests and answers as `GENERATE`, without JSON."""

    max_prompt_tokens: int

    async def connect(self) -> bool:
        """Connects, unless it is connected. False if the server does not have the route. Raises
        EngineError: the server cannot be reached."""
        ...

    async def sample(
        self,
        prompt_ids: Ids,
        request: dict[str, Any],
        take: Callable[[list[int], list[float], Ranked | None, Any], None],
    ) -> None:
        """Passes ids, log-probabilities, alternatives and a `CallEnd` to `take`. Raises
        EngineError, and what `take` raises."""
        ...

    def forget(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


class VllmEngine(HttpEngine):
    """Posts by the binary route where the server has it."""

    def __init__(
        self,
        url: str,
        *,
        words: KnownWords | None = None,
        image_token: int | None = None,
        **more: Any,
    ) -> None:
        """`words`: of the proxy's model; without them, the engine's vocabulary is not checked.
        `image_token`: the model's id for a part of an image; None: it gets no images."""
        self._words = words
        self._image_token = image_token
        self._reads_images: bool | None = None
        """Whether the engine prepares images; None: not known since it has last failed."""
        self._had = set[str]()
        """The digests of images that the engine has had."""
        self._bringing = asyncio.Semaphore(BRINGING_AT_ONCE)
        self._prompts = PromptJson()
        super().__init__(url, post=self._post_by_either_route, decode=decode, **more)
        self._frames = _binary_route(self._upstream)
        self._has_frames: bool | None = None
        """Whether the server has the binary route; None: not known since it has last failed."""
        self._info.adapters = True
        self._info.images = None if image_token is not None else False
        self._metrics_read = False
        self._sends_load = False
        self._is_vocabulary_known = False

    @classmethod
    def from_config(cls, config: EngineConfig, rendering: Rendering) -> Self:
        words, token = KnownWords.of(rendering.tokenizer), rendering.image_token
        return cls(words=words, image_token=token, **connection(config))

    async def _post_by_either_route(
        self, upstream: Upstream, call: EngineCall, received: Received
    ) -> None:
        if call.sampling.images is not None:
            return await self._post_images(upstream, call, received, call.sampling.images)
        frames = await self._open_frames(call)
        if frames is None:
            body = encode(self._prompts, call)
            return await send(upstream, GENERATE, body, call, received)
        received.cancels_itself = True

        def take(*sampled: Any) -> None:
            received.take_all(decode_frame(call, *sampled))

        await frames.sample(call.prompt_ids, request(call), take)

    async def _post_images(
        self, upstream: Upstream, call: EngineCall, received: Received, images: PromptImages
    ) -> None:
        """Images that the engine has had are not sent again, unless it turns out that it lacks one:
        after its restart, or because its cache was full."""
        digests = {span.digest for span in images.spans}
        for is_last in (False, True):
            had = digests & self._had
            try:
                items = await self._brought(upstream, call, images)
                body = encode(self._prompts, call, items)
                await send(upstream, GENERATE, body, call, received)
            except ServerError:
                if received.tokens or not had or is_last:
                    raise
                self._had -= digests
            else:
                if len(self._had) > MAX_HAD:
                    self._had.clear()
                self._had |= digests
                return

    async def _brought(self, upstream: Upstream, call: EngineCall, images: PromptImages) -> Items:
        """The items for the call itself, after the engine has got what would be too large for it.
        Calls that lack many images wait for each other, so that few items are held at a time."""
        spans = images.spans

        async def bring(count: int, items: Items) -> None:
            part = replace(images, spans=spans[:count])
            end = part.spans[-1].offset + part.spans[-1].tokens
            sampling = Sampling(max_tokens=1, adapter=call.sampling.adapter, images=part)
            begin = dataclasses.replace(
                call,
                prompt_ids=call.prompt_ids[:end],
                sampling=sampling,
                request_id=f"{call.request_id}+{count}",
                stream=False,
            )
            received = Received(decode, upstream, begin, lambda chunk: None)
            body = encode(self._prompts, begin, items)
            await send(upstream, GENERATE, body, begin, received)
            received.end()

        if len({span.digest for span in spans} - self._had) <= FEW:
            return await brought(spans, self._had, images.item, bring)
        async with self._bringing:
            return await brought(spans, self._had, images.item, bring)

    async def prepare(self, data: bytes, media_type: str) -> PreparedImage:
        """vLLM answers 500 for an image that has too many pixels: it can still prepare another
        one, so the fault is the image's."""
        token = self._image_token
        if token is None:
            return await super().prepare(data, media_type)
        body = orjson.dumps(render_request(self._info.model, data, media_type))
        try:
            answer = await self._upstream.post(RENDER, body, timeout_s=CONTROL_TIMEOUT_S)
            return read_prepared(answer, token)
        except EngineError as error:
            if data == PROBE or not (isinstance(error, ServerError) or error.status == 502):
                raise
            await self.prepare(PROBE, "image/png")  # raises if the fault is the engine's
            raise EngineRefusal(error.message) from error

    async def _learn_images(self) -> None:
        """An engine without the model's tower, or without torchvision, prepares none."""
        if self._image_token is None or self._reads_images is not None:
            return
        try:
            await self.prepare(PROBE, "image/png")
        except (EngineError, EngineRefusal) as error:
            if error.status == 503 and not isinstance(error, ServerError):
                return  # it is unreachable, too slow or busy, and is asked again
            _log.warning("engine %s gets images as text: %s", self._info.name, error.message)
            self._reads_images = False
        else:
            self._reads_images = True
        self._info.images = self._reads_images

    async def _open_frames(self, call: EngineCall) -> BinaryRoute | None:
        """The binary route, connected; None if the call is to go by the other one."""
        frames = self._frames
        if frames is None or len(call.prompt_ids) > frames.max_prompt_tokens:
            return None
        if self._has_frames:
            self._has_frames = await frames.connect()
        return frames if self._has_frames else None

    async def abort(self, request_id: str) -> None:
        body = orjson.dumps({"request_ids": [REQUEST_PREFIX + request_id]})
        await self._upstream.post(ABORT, body, timeout_s=CONTROL_TIMEOUT_S)

    def forget(self, session_id: str) -> None:
        self._prompts.forget(session_id)
        if self._frames is not None:
            self._frames.forget(session_id)

    async def check(self) -> None:
        try:
            await super().check()
        except EngineError:
            self._has_frames, self._is_vocabulary_known = None, False
            self._reads_images = None
            self._had.clear()
            raise

    async def close(self) -> None:
        if self._frames is not None:
            await self._frames.close()
        await super().close()

    async def _learn(self) -> None:
        read, self._metrics_read = self._metrics_read, False  # a check that fails reads them again
        await super()._learn()
        await self._check_vocabulary()
        await self._learn_images()
        self._metrics_read = read or await self._read_metrics()
        await self._learn_version("/weight_info")
        if self._has_frames is None and self._frames is not None:
            with contextlib.suppress(EngineError):  # the other routes work
                self._has_frames = await self._frames.connect()

    async def _check_vocabulary(self) -> None:
        """Raises EngineError: the engine serves a model with other words. One that has no tokenizer
        (`--skip-tokenizer-init`) does not say."""
        if self._words is None or self._is_vocabulary_known:
            return
        self._is_vocabulary_known, said = True, None
        body = orjson.dumps({"tokens": self._words.ids})
        with contextlib.suppress(EngineError, EngineRefusal):
            said = self._upstream.parse(
                await self._upstream.post("/detokenize", body, timeout_s=CONTROL_TIMEOUT_S)
            )
        text = said.get("prompt") if isinstance(said, dict) else None
        if isinstance(text, str) and (difference := self._words.difference(text)):
            raise self._upstream.fault(
                f"serves a model with another vocabulary than the proxy's ({difference}); give both"
                " the same checkpoint"
            )

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


def _binary_route(upstream: Upstream) -> BinaryRoute | None:
    """None where the extra is not there."""
    if BINARY_ROUTE_CLIENT is None:
        return None
    client = load_plugin("engines.kind", BINARY_ROUTE_CLIENT, {})
    made: BinaryRoute = client(upstream.address, stall_timeout_s=upstream.stall_timeout_s)
    return made


def encode(prompts: PromptJson, call: EngineCall, items: Sequence[str | None] = ()) -> bytes:
    """The body of a request of the JSON route. `items`: those of the images (`images.features`)."""
    fields, images = request(call), call.sampling.images
    spans = images.spans if images is not None else ()
    if images is not None:
        fields["features"] = features(images.spans, items)
        fields["return_token_ids"] = True
    prompt = engine_ids(call.prompt_ids, spans)
    ids = prompts.dump(prompt, call.request_id.rpartition("#")[0])
    return b'{"token_ids":%b,%b' % (ids, orjson.dumps(fields)[1:])


def request(call: EngineCall) -> dict[str, Any]:
    """The fields of a request besides the ids, for either route."""
    body = {
        "request_id": call.request_id,
        "sampling_params": sampling_params(call.sampling),
        "stream": call.stream,
    }
    if (model := call.sampling.adapter or call.info.model) is not None:
        body["model"] = model
    if call.cache_salt is not None:
        body["cache_salt"] = call.cache_salt
    return body


def decode(payloads: list[bytes], call: EngineCall, given: int) -> Iterator[Chunk]:
    """One chunk for all events that arrived together."""
    ranked = call.sampling.alternatives or call.sampling.top_logprobs
    decoder: msgspec.json.Decoder[_Answer[Any]] = _RANKED_DECODER if ranked else _DECODER
    choices: list[_Choice[Any]] = []
    failure: Exception | None = None
    try:
        for payload in payloads:
            answer = answer_in(payload, decoder)
            if not given and not choices and call.sampling.images is not None:
                check_echo(call.sampling.images.spans, answer.mm_placeholders)
            choices += answer.choices
    except (UnusableAnswer, ReportedFailure) as error:
        failure = error
    if choices:
        yield _chunk(choices, call)
    if failure is not None:
        raise failure


def decode_frame(
    call: EngineCall,
    ids: list[int],
    logprobs: list[float],
    ranked: Ranked | None,
    end: CallEnd | None,
) -> Iterator[Chunk]:
    """The chunk in what the binary route has sent."""
    chunk = Chunk(ids, logprobs)
    _check_logprobs(logprobs)
    if call.sampling.alternatives or call.sampling.top_logprobs:
        _add_ranked(chunk, ranked or [[] for _ in ids], call.sampling)
    if end is not None and end.error is None:
        chunk.finish_reason = finish_reason(end.finish or "")
        chunk.stop_reason = end.stop
        chunk.versions = version_spans(starmap(WeightSpan, end.versions), call.info)
        if call.sampling.experts_from is not None and end.routed_experts is not None:
            chunk.routed_experts = _experts(load, end.routed_experts)
    if ids or chunk.finish_reason is not None:
        yield chunk
    if end is not None and end.error is not None:
        raise ReportedFailure(end.code, end.error)


def _chunk(choices: list[_Choice[Any]], call: EngineCall) -> Chunk:
    """One chunk from the choices of events that came together (all are choice 0)."""
    chunk = Chunk([], [])
    tokens: list[Any] = []
    for choice in choices:
        if chunk.finish_reason is not None:
            raise UnusableAnswer("sent an event after its finish reason")
        chunk.ids += choice.token_ids or ()
        tokens += (choice.logprobs and choice.logprobs.content) or ()
        if choice.finish_reason is not None:
            chunk.finish_reason = finish_reason(choice.finish_reason)
            chunk.stop_reason = choice.stop_reason
            chunk.versions = version_spans(choice.weight_versions or (), call.info)
            if call.sampling.experts_from is not None and choice.routed_experts is not None:
                chunk.routed_experts = _experts(load_text, choice.routed_experts)
    chunk.logprobs = [token.logprob for token in tokens]
    if chunk.ids != [token.token_id for token in tokens]:
        raise UnusableAnswer(
            f"sent {len(chunk.ids)} tokens and log-probabilities of {len(tokens)} tokens, or of"
            " different ones"
        )
    _check_logprobs(chunk.logprobs)
    if call.sampling.alternatives or call.sampling.top_logprobs:
        tops = [[(a.token_id, a.logprob) for a in token.top_logprobs] for token in tokens]
        _add_ranked(chunk, tops, call.sampling)
    return chunk


def _add_ranked(chunk: Chunk, tops: Ranked, sampling: Sampling) -> None:
    chunk.alternatives = recorded(tops, sampling)
    if sampling.top_logprobs:
        chunk.top_logprobs = [top[: sampling.top_logprobs] for top in tops]


def version_spans(spans: Iterable[WeightSpan], info: EngineInfo) -> tuple[VersionSpan, ...]:
    """The versions of an answer, the last of which is the replica's. Raises UnusableAnswer."""
    versions = tuple(VersionSpan(weight_version(s.version, info), s.start, s.end) for s in spans)
    if versions:
        info.version = versions[-1].version
    return versions


def _experts(load: Callable[[D], RoutedExperts | None], data: D) -> RoutedExperts | None:
    try:
        return load(data)
    except ValueError as error:
        raise UnusableAnswer(f"sent unreadable routed experts: {error}") from error


def _check_logprobs(logprobs: list[float]) -> None:
    if logprobs and min(logprobs) <= MISSING_LOGPROB:
        raise UnusableAnswer("sent a token without its log-probability")


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
    if s.first_seed is not None:
        params["extra_args"] = {FIRST_SEED: s.first_seed}
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
