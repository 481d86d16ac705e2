"""The client of any `/v1/completions` route that accepts token ids and reports the sampled ids.

All versions of vLLM do: `return_token_ids`, and before that `return_tokens_as_token_ids`.
Invariant: an answer without ids, or with an id that has no log-probability, is an error. The
server's settings determine the distribution of the log-probabilities (vLLM: `--logprobs-mode
processed_logprobs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import orjson

from proxy.engines.http_engine import (
    Answer,
    Choice,
    EngineCall,
    HttpEngine,
    UnusableAnswer,
    answer_in,
    finish_reason,
    posting,
    recorded,
)
from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import sampling_params

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


_DECODER = msgspec.json.Decoder(_Answer)


class CompletionsEngine(HttpEngine):
    """Does not report weight versions."""

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(url, post=posting(COMPLETIONS, encode), decode=decode, **more)


def encode(call: EngineCall) -> bytes:
    """The body of a request."""
    body = sampling_params(call.sampling)
    del body["detokenize"]
    body |= {
        "prompt": np.ascontiguousarray(call.prompt_ids),
        "stream": call.stream,
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if call.info.model is not None:
        body["model"] = call.info.model
    if call.cache_salt is not None:
        body["cache_salt"] = call.cache_salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode(payloads: list[bytes], call: EngineCall, given: int) -> Iterator[Chunk]:
    """One chunk per event."""
    for payload in payloads:
        answer = answer_in(payload, _DECODER)
        for choice in answer.choices:
            yield _chunk(choice, call.sampling)


def _chunk(choice: _Choice, sampling: Sampling) -> Chunk:
    logprobs = choice.logprobs or _Logprobs()
    ids = choice.token_ids
    if ids is None:
        ids = [_token_id(word) for word in logprobs.tokens]
    known = [p for p in logprobs.token_logprobs if p is not None and p > MISSING_LOGPROB]
    if len(known) != len(ids):
        raise UnusableAnswer(f"sent {len(ids)} token ids and {len(known)} log-probabilities")
    chunk = Chunk(ids, known, stop_reason=choice.stop_reason)
    if logprobs.top_logprobs:
        tops = [
            [(_token_id(word), p) for word, p in (top or {}).items()]
            for top in logprobs.top_logprobs
        ]
        chunk.alternatives = recorded(tops, sampling)
        if sampling.alternatives > sampling.top_logprobs:
            tops = [_requested(top, sampling.top_logprobs) for top in tops]
        chunk.top_logprobs = tops
    if choice.finish_reason is not None:
        chunk.finish_reason = finish_reason(choice.finish_reason)
    return chunk


def _token_id(word: str) -> int:
    number = word.removeprefix(_TOKEN_WORD)
    if number == word or not (number.isascii() and number.isdigit() and len(number) <= 10):
        raise UnusableAnswer(
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
