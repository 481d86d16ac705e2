"""Gets the log-probabilities of recorded tokens from a vLLM, for a replay.

There are two exact ways. `path` is one prefill, and one call for the last token: vLLM computes the
log-probabilities of a prompt before it applies any sampling parameter. `sampled` makes one call of
one token for each recorded token, with the parameters that it was sampled with; the prefix cache
makes such a call one step. Parameters that depend on the answer so far (presence and frequency
penalty, a grammar) have no effect in a call that begins in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import orjson

from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.engines.upstream import Upstream
from proxy.engines.vllm import GENERATE
from proxy.records import Ids, Logprobs

AT_ONCE = 32
"""Number of concurrent one-token calls."""


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

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._upstream = Upstream(url, api_key=api_key)
        self._places = asyncio.Semaphore(AT_ONCE)

    async def close(self) -> None:
        await self._upstream.close()

    async def path(self, ids: Ids) -> Logprobs:
        """`[T]`: each id's log-probability given the preceding ids, at temperature 1; 0 for the
        first id. Raises EngineError or RequestError."""
        # The engine refuses a prompt without room for a token after it, and the last id may fill
        # its context: it is scored as that token.
        prompt = ids[:-1]
        answer = await self._ask(prompt, {"temperature": 1.0, "prompt_logprobs": 0})
        scored = answer.prompt_logprobs or []
        if len(scored) != len(prompt):
            raise self._upstream.fault(f"scored {len(scored)} of {len(prompt)} tokens")
        values = np.zeros(len(ids), np.float32)
        for at, (token, known) in enumerate(zip(prompt.tolist(), scored, strict=True)):
            entry = (known or {}).get(str(token))
            if entry is None and at:
                raise self._upstream.fault(f"did not score token {token} at {at}")
            values[at] = entry.logprob if entry is not None else 0.0
        values[-1] = await self._token(ids, len(prompt), {"temperature": 1.0})
        return values

    async def sampled(self, path: Ids, count: int, params: Mapping[str, Any]) -> Logprobs:
        """`[count]`: log-probabilities of the path's last ids under these SamplingParams; minus
        infinity for an id that they exclude. Raises EngineError or RequestError."""
        starts = range(len(path) - count, len(path))
        first = await self._token(path, starts[0], params)  # fills the prefix cache for the others
        rest = [self._token(path, at, params) for at in starts[1:]]
        return np.array([first, *await asyncio.gather(*rest)], np.float32)

    async def _token(self, path: Ids, at: int, params: Mapping[str, Any]) -> float:
        token = int(path[at])
        # Listed twice, because vLLM's first result is the token that it sampled.
        asked = {**params, "logprob_token_ids": [token, token], "logprobs": 2}
        async with self._places:
            answer = await self._ask(path[:at], asked)
        for choice in answer.choices:
            for position in choice.logprobs.content if choice.logprobs else ():
                for entry in position.top_logprobs:
                    if entry.token_id == token:
                        known = entry.logprob > MISSING_LOGPROB
                        return entry.logprob if known else -math.inf
        raise self._upstream.fault(f"did not score token {token} at {at}")

    async def _ask(self, ids: Ids, params: Mapping[str, Any]) -> _Answer:
        body = {
            "token_ids": np.ascontiguousarray(ids),
            "sampling_params": {"max_tokens": 1, **params},
            "stream": False,
        }
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        answered = await self._upstream.post(GENERATE, data)
        try:
            return self._decoder.decode(answered)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._upstream.fault(f"sent an invalid response: {error}") from error
