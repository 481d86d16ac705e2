"""The wires that the scripted engine speaks: vLLM's, the completions route's, SGLang's.

Each reads a request into a `ScriptedCall`, and writes a slice of what was sampled as that engine
writes it. Invariant: what is written depends on the call alone, so the same call has the same
log-probabilities on every wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from proxy.engines import completions, sglang, vllm

FaultKind = Literal["error", "die", "stall", "missing_logprob", "nonsense"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one call, once `after_tokens` tokens were sent.

    `error` answers 500 (in a stream: an error event), `die` cuts the connection, `stall` says
    nothing more, `missing_logprob` and `nonsense` break the protocol.
    """

    kind: FaultKind
    after_tokens: int = 0


@dataclass(slots=True)
class ScriptedCall:
    """One call as the engine saw it."""

    request_id: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    cache_salt: str | None
    stream: bool
    no_logprob: float | None = None
    """What the wire has in a missing one's place."""
    fault: Fault | None = None
    answer_ids: list[int] = field(default_factory=list)
    """What was sent, a part of the script's answer where the call was cut."""
    versions: list[int] = field(default_factory=list)
    """Of each id of the answer."""
    finish_reason: str | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first token was sampled."""
    abort: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the abort route, and by the client's going away."""

    @property
    def breaks(self) -> bool:
        """Whether its fault ends it before its answer's end."""
        return self.fault is not None and self.fault.kind != "missing_logprob"

    @property
    def path(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True, slots=True)
class Wire:
    """How one kind of engine is spoken to."""

    route: str
    read: Callable[[dict[str, Any]], ScriptedCall]
    write: Callable[[ScriptedCall, int, int], dict[str, Any]]
    """Tokens `[start, end)` as the body of an event, or of the whole answer."""


def scripted_logprob(previous_id: int, token_id: int) -> float:
    """In [-2, 0), exact in float32, the same for the same two ids."""
    return -((previous_id * 31 + token_id * 17) % 1024 + 1) / 512


def _read_vllm(body: dict[str, Any]) -> ScriptedCall:
    return ScriptedCall(
        request_id=body.get("request_id", ""),
        prompt_ids=body["token_ids"],
        sampling=body["sampling_params"],
        cache_salt=body.get("cache_salt"),
        stream=bool(body.get("stream")),
        no_logprob=vllm.MISSING_LOGPROB,
    )


def _write_vllm(call: ScriptedCall, start: int, end: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"token_id": token, "logprob": logprob, "rank": 1}
        for token, logprob in _sampled(call, start, end)
    ]
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
    }
    answer: dict[str, Any] = {"request_id": call.request_id, "choices": [choice]}
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
    sampled = _sampled(call, start, end)
    logprobs = {
        "tokens": [f"token_id:{token}" for token, _ in sampled],
        "token_logprobs": [logprob for _, logprob in sampled],
        "top_logprobs": [{f"token_id:{token}": logprob} for token, logprob in sampled],
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
        sampling={**sampling, "max_tokens": sampling["max_new_tokens"]},
        cache_salt=body.get("extra_key"),
        stream=bool(body.get("stream")),
    )


def _write_sglang(call: ScriptedCall, start: int, end: int) -> dict[str, Any]:
    """Each event repeats what came before."""
    finish = _finish(call, end)
    kinds: dict[str | None, dict[str, Any]] = {
        "stop": {"matched": next(reversed(call.answer_ids), None)},
        "length": {"length": end},
    }
    meta = {
        "id": call.request_id,
        "prompt_tokens": len(call.prompt_ids),
        "completion_tokens": end,
        "output_token_logprobs": [[p, token, None] for token, p in _sampled(call, 0, end)],
        "finish_reason": {"type": finish, **kinds.get(finish, {})} if finish else None,
        "weight_version": str(call.versions[-1]) if call.versions else "default",
    }
    return {"text": "", "output_ids": call.answer_ids[:end], "meta_info": meta}


WIRES = (
    Wire(vllm.GENERATE, _read_vllm, _write_vllm),
    Wire(completions.COMPLETIONS, _read_completions, _write_completions),
    Wire(sglang.GENERATE, _read_sglang, _write_sglang),
)


def _sampled(call: ScriptedCall, start: int, end: int) -> list[tuple[int, float | None]]:
    """Ids with their log-probabilities; a fault leaves the last one's out."""
    before = [call.prompt_ids[-1], *call.answer_ids]
    sampled: list[tuple[int, float | None]] = [
        (token, scripted_logprob(before[at], token))
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
