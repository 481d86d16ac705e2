"""The wire formats of the scripted engine: vLLM's, SGLang's and the completions route's.

Each parses a request into a `ScriptedCall` and writes a slice of the sampled tokens in that
engine's format. Invariant: the output depends only on the call, so that the same call has the same
log-probabilities in every format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log
from typing import Any, Literal

import numpy as np

from proxy.engines import vllm
from proxy.engines.missing_logprob import MISSING_LOGPROB
from proxy.records import RoutedExperts, routed_experts

COMPLETIONS = "/v1/completions"
SGLANG_GENERATE = "/generate"
"""Routes as these engines document them, not taken from the clients that are tested with them."""

FaultKind = Literal["error", "die", "stall", "abort", "missing_logprob", "nonsense"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure of one call after `after_tokens` tokens.

    `error` answers 500 (in a stream: an error event), `die` cuts the connection, `stall` says
    nothing more, `abort` ends the answer with that finish reason, `missing_logprob` and `nonsense`
    break the protocol.
    """

    kind: FaultKind
    after_tokens: int = 0


class ScriptedRefusal(Exception):
    """The scripted engine does not accept a call, or fails it."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(slots=True)
class ScriptedCall:
    """One call as the engine received it."""

    request_id: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    cache_salt: str | None
    stream: bool
    model: str | None = None
    """The requested model or adapter, where the wire format has one."""
    no_logprob: float | None = None
    """The value that the wire format uses for a missing log-probability."""
    features: dict[str, Any] | None = None
    """The images of the prompt, in vLLM's form."""
    fault: Fault | None = None
    answer_ids: list[int] = field(default_factory=list)
    """The ids that were sent; only a part of the script's answer if the call was cut."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the answer; empty: `scripted_logprob` has them."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights for each id of the answer."""
    finish_reason: str | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first token has been sampled."""
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the abort route, and when the client disconnects."""

    @property
    def breaks(self) -> bool:
        """Whether its fault ends it before its answer's end."""
        return self.fault is not None and self.fault.kind not in ("missing_logprob", "abort")

    @property
    def path(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True, slots=True)
class Wire:
    """The wire format of one kind of engine."""

    route: str
    read: Callable[[dict[str, Any]], ScriptedCall]
    write: Callable[[ScriptedCall, int, int], dict[str, Any]]
    """Tokens `[start, end)` as the body of an event or of a whole answer."""


def scripted_logprob(previous_id: int, token_id: int) -> float:
    """A log-probability in [-2, 0) that is exact in float32 and depends only on the two ids."""
    return -((previous_id * 31 + token_id * 17) % 1024 + 1) / 512


def scripted_experts(ids: Sequence[int]) -> RoutedExperts:
    """The experts of each token, `[T, 2, 2]`: of 8 in each of two layers, by position and id."""
    first = np.arange(len(ids))[:, None] + np.array(ids, np.int64)[:, None] + np.arange(2)
    return (np.stack([first, first + 3], -1) % 8).astype(np.uint8)


def scripted_alternatives(sampled_id: int, logprob: float, count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens: the ids after the sampled one share the rest of the
    probability, each half as probable as the one before."""
    rest = log(max(1 - exp(logprob), 1e-9))
    others = [((sampled_id + at) % 256, rest - at * log(2)) for at in range(1, count + 1)]
    return sorted([(sampled_id, logprob), *others], key=lambda each: -each[1])[:count]


def _reported(token: int, logprob: float | None, wanted: int) -> list[tuple[int, float | None]]:
    """What vLLM knows at a position: the sampled token, and then the others of the most probable
    ones."""
    best = [] if logprob is None else scripted_alternatives(token, logprob, wanted)
    return [(token, logprob), *(each for each in best if each[0] != token)]


def _experts_text(call: ScriptedCall, end: int) -> str | None:
    """What vLLM sends with the last token, if the call says from which token on."""
    start = call.sampling.get("routed_experts_prompt_start")
    if start is None:
        return None
    rows = scripted_experts([*call.prompt_ids, *call.answer_ids[:end]])[start:-1]
    return routed_experts.dump_text(rows)


def _read_vllm(body: dict[str, Any]) -> ScriptedCall:
    return ScriptedCall(
        request_id=body.get("request_id", ""),
        prompt_ids=body["token_ids"],
        sampling=body["sampling_params"],
        cache_salt=body.get("cache_salt"),
        stream=bool(body.get("stream")),
        model=body.get("model"),
        no_logprob=MISSING_LOGPROB,
        features=body.get("features"),
    )


def _write_vllm(call: ScriptedCall, start: int, end: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"token_id": token, "logprob": logprob, "rank": 1}
        for token, logprob in _sampled(call, start, end)
    ]
    if wanted := call.sampling.get("logprobs"):
        for entry in content:
            tops = _reported(entry["token_id"], entry["logprob"], wanted)[:wanted]
            entry["top_logprobs"] = [{"token_id": token, "logprob": p} for token, p in tops]
    if "logprob_token_ids" in call.sampling:
        previous = call.prompt_ids[-1]  # asked of calls of one token
        content[0]["top_logprobs"] = [
            {"token_id": token, "logprob": scripted_logprob(previous, token)}
            for token in call.sampling["logprob_token_ids"]
        ]
    finish = _finish(call, end)
    choice = {
        "index": 0,
        "token_ids": call.answer_ids[start:end],
        "logprobs": {"content": content},
        "finish_reason": finish,
        "stop_reason": None,
        "weight_versions": list(_spans(call.versions)) if finish else None,
        "routed_experts": _experts_text(call, end) if finish else None,
    }
    answer: dict[str, Any] = {"request_id": call.request_id, "choices": [choice]}
    if call.features is not None and start == 0:
        answer["mm_placeholders"] = call.features["mm_placeholders"]
    if call.sampling.get("prompt_logprobs") is not None:
        answer["prompt_logprobs"] = _scored(call.prompt_ids)
    return answer


def _scored(ids: list[int]) -> list[dict[str, Any] | None]:
    return [None, *({str(b): {"logprob": scripted_logprob(a, b)}} for a, b in pairwise(ids))]


def _read_completions(body: dict[str, Any]) -> ScriptedCall:
    return ScriptedCall(
        request_id=f"cmpl-{id(body)}",
        prompt_ids=body["prompt"],
        sampling=body,
        cache_salt=body.get("cache_salt"),
        stream=bool(body.get("stream")),
    )


def _write_completions(call: ScriptedCall, start: int, end: int) -> dict[str, Any]:
    sampled, wanted = _sampled(call, start, end), call.sampling.get("logprobs") or 0
    logprobs = {
        "tokens": [f"token_id:{token}" for token, _ in sampled],
        "token_logprobs": [logprob for _, logprob in sampled],
        "top_logprobs": [
            {f"token_id:{token}": p for token, p in _reported(*each, wanted)} for each in sampled
        ],
    }
    choice = {
        "index": 0,
        "text": "",
        "token_ids": call.answer_ids[start:end],
        "logprobs": logprobs,
        "finish_reason": _finish(call, end),
    }
    return {"id": call.request_id, "object": "text_completion", "choices": [choice]}


def _read_sglang(body: dict[str, Any]) -> ScriptedCall:
    sampling = body["sampling_params"]
    return ScriptedCall(
        request_id=body["rid"],
        prompt_ids=body["input_ids"],
        sampling={
            **sampling,
            "max_tokens": sampling["max_new_tokens"],
            "logprobs": body.get("top_logprobs_num", 0),
        },
        cache_salt=body.get("extra_key"),
        stream=bool(body.get("stream")),
    )


def _write_sglang(call: ScriptedCall, start: int, end: int) -> dict[str, Any]:
    """Each event repeats the previous ones."""
    finish = _finish(call, end)
    kinds: dict[str | None, dict[str, Any]] = {
        "stop": {"matched": next(reversed(call.answer_ids), None)},
        "length": {"length": end},
    }
    sampled = _sampled(call, 0, end)
    meta = {
        "id": call.request_id,
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": end,
        "output_token_logprobs": [[p, token, None] for token, p in sampled],
        "finish_reason": {"type": finish, **kinds.get(finish, {})} if finish else None,
        "weight_version": str(call.versions[-1]) if call.versions else "default",
    }
    if wanted := call.sampling["logprobs"]:
        meta["output_top_logprobs"] = [
            [[p, token, None] for token, p in scripted_alternatives(own, logprob, wanted)]
            for own, logprob in sampled
            if logprob is not None
        ]
    return {"text": "", "output_ids": call.answer_ids[:end], "meta_info": meta}


WIRES = (
    Wire(vllm.GENERATE, _read_vllm, _write_vllm),
    Wire(COMPLETIONS, _read_completions, _write_completions),
    Wire(SGLANG_GENERATE, _read_sglang, _write_sglang),
)


def _sampled(call: ScriptedCall, start: int, end: int) -> list[tuple[int, float | None]]:
    """Ids with their log-probabilities; a `missing_logprob` fault removes the last one."""
    before = [call.prompt_ids[-1], *call.answer_ids]
    sampled: list[tuple[int, float | None]] = [
        (token, call.logprobs[at] if call.logprobs else scripted_logprob(before[at], token))
        for at, token in enumerate(call.answer_ids[start:end], start)
    ]
    if call.fault is not None and call.fault.kind == "missing_logprob" and sampled:
        sampled[-1] = (sampled[-1][0], call.no_logprob)
    return sampled


def _finish(call: ScriptedCall, end: int) -> str | None:
    return call.finish_reason if end == len(call.answer_ids) else None


def _spans(versions: list[int]) -> Iterator[dict[str, Any]]:
    start = 0
    for at in range(1, len(versions) + 1):
        if at == len(versions) or versions[at] != versions[start]:
            yield {"version": str(versions[start]), "start": start, "end": at}
            start = at
