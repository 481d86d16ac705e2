"""The client of SGLang's native `POST /generate`: `input_ids` in, ids and log-probabilities out.

Invariant: ids and log-probabilities come from the same list (`output_token_logprobs`), so that
neither can be missing. Depending on its settings, SGLang repeats earlier tokens in each event;
`completion_tokens` determines how many entries of the list are new. The log-probabilities are those
of the distribution after temperature and before top-p and top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import orjson

from proxy.engines.http_engine import (
    CONTROL_TIMEOUT_S,
    Answer,
    EngineCall,
    HttpEngine,
    ReportedFailure,
    UnusableAnswer,
    answer_in,
    finish_reason,
    posting,
    recorded,
    weight_version,
)
from proxy.engines.protocol import Chunk, EngineInfo, Sampling
from proxy.errors import RequestError
from proxy.records import VersionSpan

GENERATE = "/generate"
ABORT = "/abort_request"
_Entry = tuple[float | None, int, str | None]
"""Log-probability, token id, text."""


class _Finish(msgspec.Struct, gc=False):
    type: str
    matched: int | str | list[int] | None = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct, gc=False):
    completion_tokens: int = 0
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Entry] = []
    output_top_logprobs: list[list[_Entry] | None] | None = None
    weight_version: str | None = None


class _Answer(Answer, gc=False):
    meta_info: _Meta | None = None


_DECODER = msgspec.json.Decoder(_Answer)


class SglangEngine(HttpEngine):
    """Reports weight versions, and is told when a call ends early."""

    def __init__(self, url: str, **more: Any) -> None:
        super().__init__(url, post=posting(GENERATE, encode), decode=decode, **more)

    async def abort(self, request_id: str) -> None:
        await self._upstream.post(
            ABORT, orjson.dumps({"rid": request_id}), timeout_s=CONTROL_TIMEOUT_S
        )

    async def _learn(self) -> None:
        await super()._learn()
        await self._learn_version("/get_model_info")


def encode(call: EngineCall) -> bytes:
    """The body of a request."""
    sampling = call.sampling
    body = {
        "rid": call.request_id,
        "input_ids": np.ascontiguousarray(call.prompt_ids),
        "sampling_params": _sampling_params(sampling),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": max(sampling.alternatives, sampling.top_logprobs),
        "stream": call.stream,
    }
    if call.cache_salt is not None:
        body["extra_key"] = call.cache_salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode(payloads: list[bytes], call: EngineCall, given: int) -> Iterator[Chunk]:
    """One chunk per event: its tokens after the first `given` ones."""
    for payload in payloads:
        answer = answer_in(payload, _DECODER)
        chunk = _chunk(answer.meta_info, call, given)
        given += len(chunk.ids)
        yield chunk


def _chunk(meta: _Meta | None, call: EngineCall, given: int) -> Chunk:
    if meta is None:
        raise UnusableAnswer("sent a response without meta_info")
    new = meta.completion_tokens - given
    if new < 0:
        raise UnusableAnswer(f"sent {given} tokens before, but now reports {-new} fewer")
    entries = meta.output_token_logprobs[-new:] if new else []
    if len(entries) != new:
        raise UnusableAnswer(f"sent {len(entries)} of {new} new log-probabilities")
    logprobs = [p for p, _, _ in entries if p is not None]
    if len(logprobs) != len(entries):
        raise UnusableAnswer("sent a token without its log-probability")
    chunk = Chunk([token for _, token, _ in entries], logprobs)
    if meta.output_top_logprobs and new > 0:
        tops = [
            [(token, p) for p, token, _ in top or () if p is not None]
            for top in meta.output_top_logprobs[-new:]
        ]
        chunk.alternatives = recorded(tops, call.sampling)
        if call.sampling.top_logprobs:
            chunk.top_logprobs = [top[: call.sampling.top_logprobs] for top in tops]
    if meta.finish_reason is not None:
        _finish(chunk, meta, meta.finish_reason, call.info)
    return chunk


def _finish(chunk: Chunk, meta: _Meta, finish: _Finish, info: EngineInfo) -> None:
    if finish.type == "abort" and finish.status_code is not None:
        raise ReportedFailure(finish.status_code, finish.message)
    chunk.finish_reason = finish_reason(finish.type)
    chunk.stop_reason = finish.matched if isinstance(finish.matched, int | str) else None
    if meta.weight_version is not None and meta.completion_tokens:
        info.version = weight_version(meta.weight_version, info)
        chunk.versions = (VersionSpan(info.version, 0, meta.completion_tokens),)


def _sampling_params(s: Sampling) -> dict[str, Any]:
    """The parameters by SGLang's names. Neutral values are sent too, as for vLLM."""
    params: dict[str, Any] = {
        "max_new_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "repetition_penalty": s.repetition_penalty,
        "skip_special_tokens": False,
    }
    if s.seed is not None:
        params["sampling_seed"] = s.seed
    if s.stop:
        params["stop"] = list(s.stop)
    if s.stop_token_ids:
        params["stop_token_ids"] = list(s.stop_token_ids)
    if s.structured is not None:
        params |= _structured(s.structured)
    return params


_STRUCTURED = (("regex", "regex"), ("grammar", "ebnf"), ("structural_tag", "structural_tag"))


def _structured(wanted: dict[str, Any]) -> dict[str, str]:
    """Converts vLLM's `structured_outputs`, which the proxy uses."""
    if "json" in wanted:
        schema = wanted["json"]
        return {"json_schema": schema if isinstance(schema, str) else orjson.dumps(schema).decode()}
    if wanted.get("json_object"):
        return {"json_schema": '{"type": "object"}'}
    for ours, theirs in _STRUCTURED:
        if ours in wanted:
            return {theirs: str(wanted[ours])}
    raise RequestError(f"structured output by {sorted(wanted)} is not supported with SGLang")
