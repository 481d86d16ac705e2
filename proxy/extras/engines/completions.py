"""The client of any `/v1/completions` route that accepts token ids and reports the sampled ids.

All versions of vLLM do: `return_token_ids`, and before that `return_tokens_as_token_ids`.
Invariant: an answer without ids, or with an id that has no log-probability, is an error. The
server's settings determine the distribution of the log-probabilities (vLLM: `--logprobs-mode
processed_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import orjson

from proxy.engines.http_engine import Answer, Choice, HttpEngine
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import sampling_params
from proxy.extras.binary_route.frames import MISSING_LOGPROB
from proxy.records import Ids

COMPLETIONS = "/v1/completions"
_TOKEN_WORD = "token_id:"


class _Logprobs(msgspec.Struct, gc=False):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Choice, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answer(Answer, gc=False):
    choices: list[_Choice] = msgspec.field(default_factory=list)


class CompletionsEngine(HttpEngine[_Answer]):
    """Implements `proxy.engines.protocol.Engine`. Does not report weight versions."""

    route = COMPLETIONS
    _decoder = msgspec.json.Decoder(_Answer)

    def _body(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        request_id: str,
        cache_salt: str | None,
        stream: bool,
    ) -> bytes:
        body = sampling_params(sampling)
        del body["detokenize"]
        body |= {
            "prompt": np.ascontiguousarray(prompt_ids),
            "stream": stream,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self._info.model is not None:
            body["model"] = self._info.model
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    def _chunks(
        self, answers: Sequence[_Answer], sampling: Sampling, given: int
    ) -> Iterator[Chunk]:
        for answer in answers:
            for choice in answer.choices:
                yield self._chunk(choice, sampling)

    def _chunk(self, choice: _Choice, sampling: Sampling) -> Chunk:
        logprobs = choice.logprobs or _Logprobs()
        ids = choice.token_ids
        if ids is None:
            ids = [self._token_id(word) for word in logprobs.tokens]
        known = [p for p in logprobs.token_logprobs if p is not None and p > MISSING_LOGPROB]
        if len(known) != len(ids):
            raise self._upstream.fault(
                f"sent {len(ids)} token ids and {len(known)} log-probabilities"
            )
        chunk = Chunk(ids, known, stop_reason=choice.stop_reason)
        if logprobs.top_logprobs:
            tops = [
                [(self._token_id(word), p) for word, p in (top or {}).items()]
                for top in logprobs.top_logprobs
            ]
            chunk.alternatives = self._recorded(tops, sampling)
            if sampling.alternatives > sampling.top_logprobs:
                tops = [_requested(top, sampling.top_logprobs) for top in tops]
            chunk.top_logprobs = tops
        if choice.finish_reason is not None:
            chunk.finish_reason = self._finish_reason(choice.finish_reason)
        return chunk

    def _token_id(self, word: str) -> int:
        number = word.removeprefix(_TOKEN_WORD)
        if number == word or not (number.isascii() and number.isdigit() and len(number) <= 10):
            raise self._upstream.fault(
                f"sent the token {word[:40]!r} without its id, so that it cannot be trained; for"
                " eval sessions, add the engine with kind `text`"
            )
        return int(number)


def _requested(top: list[tuple[int, float]], count: int) -> list[tuple[int, float]]:
    """What vLLM answers to a request for `count` alternatives, from its answer to one for more: the
    sampled token, and the others of the `count` most probable ones."""
    sampled, others = top[:1], top[1 : count + 1]
    if others and len(others) == count and sampled[0][1] >= others[-1][1]:
        others.pop()
    return sampled + others
