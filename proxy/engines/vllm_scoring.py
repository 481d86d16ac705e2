"""Gets the log-probabilities of recorded tokens from a vLLM, for a replay.

There are two exact ways. `path` is one prefill, and one call for the last token: vLLM computes the
log-probabilities of a prompt before it applies any sampling parameter. `sampled` makes one call of
one token for each recorded token, with the parameters that it was sampled with; the prefix cache
makes such a call one step. Parameters that depend on the answer so far (presence and frequency
penalty, a grammar) have no effect in a call that begins in the middle of an answer.

Images are prepared by the engine from the recorded bytes. Invariant: an engine that makes other
pixels of them than the one that sampled scores nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import orjson

from proxy.engines.images import (
    RENDER,
    Items,
    brought,
    features,
    read_prepared,
    render_request,
)
from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.engines.upstream import ServerError, Upstream
from proxy.engines.vllm import GENERATE
from proxy.errors import ImageError
from proxy.records import Ids, ImageSpan, Logprobs, RecordedImage
from proxy.records.images import engine_ids, within

AT_ONCE = 32
"""Number of concurrent one-token calls."""
ITEMS = 64
"""Prepared images that are kept. A screenshot has 6 MB."""


class ImageSource(Protocol):
    """A store, or anything with this method of a store."""

    async def get_image(self, sha256: str) -> RecordedImage | None: ...


class _Known(msgspec.Struct, gc=False):
    logprob: float


class _Alternative(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Position(msgspec.Struct, gc=False):
    top_logprobs: list[_Alternative] = []


class _Content(msgspec.Struct, gc=False):
    content: list[_Position] = []


class _Choice(msgspec.Struct, gc=False):
    logprobs: _Content | None = None


class _Answer(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    prompt_logprobs: list[dict[str, _Known] | None] | None = None


class VllmScorer:
    """Implements `proxy.commands.replay.Scorer`."""

    _decoder = msgspec.json.Decoder(_Answer)

    def __init__(self, url: str, *, source: ImageSource, api_key: str | None = None) -> None:
        """`source`: where the recorded images are."""
        self._upstream = Upstream(url, api_key=api_key)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._source = source
        self._items: OrderedDict[str, str] = OrderedDict()
        """What the engine made of images, by digest."""
        self._had: set[str] = set()
        """Digests of images that the engine has got."""

    async def close(self) -> None:
        await self._upstream.close()

    async def path(self, ids: Ids, images: Sequence[ImageSpan] = ()) -> Logprobs:
        """`[T]`: each id's log-probability given the preceding ids, at temperature 1; 0 for the
        first id. `images`: those in the ids. Raises EngineError, RequestError or ImageError."""
        ids = engine_ids(ids, images)
        # The engine refuses a prompt without room for a token after it, and the last id may fill
        # its context: it is scored as that token.
        prompt = ids[:-1]
        answer = await self._ask(prompt, {"temperature": 1.0, "prompt_logprobs": 0}, images)
        scored = answer.prompt_logprobs or []
        if len(scored) != len(prompt):
            raise self._upstream.fault(f"scored {len(scored)} of {len(prompt)} tokens")
        values = np.zeros(len(ids), np.float32)
        for at, (token, known) in enumerate(zip(prompt.tolist(), scored, strict=True)):
            entry = (known or {}).get(str(token))
            if entry is None and at:
                raise self._upstream.fault(f"did not score token {token} at {at}")
            values[at] = entry.logprob if entry is not None else 0.0
        values[-1] = await self._token(ids, len(prompt), {"temperature": 1.0}, images)
        return values

    async def sampled(
        self,
        path: Ids,
        count: int,
        params: Mapping[str, Any],
        images: Sequence[ImageSpan] = (),
    ) -> Logprobs:
        """`[count]`: log-probabilities of the path's last ids under these SamplingParams; minus
        infinity for an id that they exclude. `images`: those in the path. Raises EngineError,
        RequestError or ImageError."""
        path, starts = engine_ids(path, images), range(len(path) - count, len(path))
        # The first one fills the prefix cache for the others.
        first = await self._token(path, starts[0], params, images)
        rest = [self._token(path, at, params, images) for at in starts[1:]]
        return np.array([first, *await asyncio.gather(*rest)], np.float32)

    async def _token(
        self, path: Ids, at: int, params: Mapping[str, Any], images: Sequence[ImageSpan]
    ) -> float:
        token = int(path[at])
        # Listed twice, because vLLM's first result is the token that it sampled.
        asked = {**params, "logprob_token_ids": [token, token], "logprobs": 2}
        async with self._places:
            answer = await self._ask(path[:at], asked, images)
        for choice in answer.choices:
            for position in choice.logprobs.content if choice.logprobs else ():
                for entry in position.top_logprobs:
                    if entry.token_id == token:
                        known = entry.logprob > MISSING_LOGPROB
                        return entry.logprob if known else -math.inf
        raise self._upstream.fault(f"did not score token {token} at {at}")

    async def _ask(
        self, ids: Ids, params: Mapping[str, Any], images: Sequence[ImageSpan]
    ) -> _Answer:
        body: dict[str, Any] = {
            "token_ids": np.ascontiguousarray(ids),
            "sampling_params": {"max_tokens": 1, **params},
            "stream": False,
        }
        answered = await self._post(body, within(images, 0, len(ids)))
        try:
            answer = self._decoder.decode(answered)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._upstream.fault(f"sent an invalid response: {error}") from error
        return answer

    async def _post(self, body: dict[str, Any], images: Sequence[ImageSpan]) -> bytes:
        """Images that the engine has got are not sent again, unless it lacks one."""
        if not images:
            return await self._upstream.post(GENERATE, _dumped(body))
        digests = {each.digest for each in images}

        async def bring(count: int, items: Items) -> None:
            end = images[count - 1].offset + images[count - 1].tokens
            begin = {**body, "token_ids": body["token_ids"][:end]}
            begin["sampling_params"] = {"max_tokens": 1}
            begin["features"] = features(images[:count], items)
            await self._upstream.post(GENERATE, _dumped(begin))

        for is_last in (False, True):
            had = digests & self._had
            try:
                items = await brought(images, self._had, self._item, bring)
                body["features"] = features(images, items)
                answered = await self._upstream.post(GENERATE, _dumped(body))
            except ServerError:
                if not had or is_last:
                    raise
                self._had -= digests
            else:
                self._had |= digests
                return answered
        raise AssertionError  # the second time ends it

    async def _item(self, span: ImageSpan) -> str:
        item = self._items.pop(span.digest, None)
        if item is None:
            image = await self._source.get_image(span.sha256)
            if image is None:
                raise ImageError(f"image {span.sha256} is not in the store")
            request = orjson.dumps(render_request(None, image.data, image.media_type))
            made = read_prepared(await self._upstream.post(RENDER, request), span.token)
            if (made.digest, made.tokens) != (span.digest, span.tokens):
                raise ImageError(
                    f"image {span.sha256} was recorded as {span.tokens} tokens of {span.digest}, "
                    f"but this engine makes {made.tokens} tokens of {made.digest} of it: its "
                    "processor is another one"
                )
            item = made.item
        self._items[span.digest] = item
        while len(self._items) > ITEMS:
            self._items.popitem(last=False)
        return item


def _dumped(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
