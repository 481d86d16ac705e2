"""Chooses the sampling parameters: the session's pinned ones, or the agent's own.

Invariant: in a TRAIN session every parameter that changes the distribution comes from the session
(pinned, or else neutral), whatever the agent sends. The trainer can therefore recompute the
recorded log-probabilities. In an EVAL session the agent's parameters apply unless pinned.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from proxy.conversation import Conversation
from proxy.engines.protocol import COLDEST, Sampling
from proxy.errors import ContextOverflow, RequestError
from proxy.records import Ids, Session, SessionKind
from proxy.records.alternatives import MAX_ALTERNATIVES
from proxy.wire.dialect import BOUNDS, WHOLE, Options

_BENDING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
_RECORDED = ("max_tokens", *_BENDING, "structured")
_bending, _recorded = attrgetter(*_BENDING), attrgetter(*_RECORDED)
PINNABLE = frozenset((*_BENDING, "max_tokens", "routed_experts", "alternatives"))
"""`routed_experts`: 1 to record which experts the router of each layer chose, 0 not to.
`alternatives`: number of the most probable tokens to record at each sampled position."""
_BOUNDS = {**BOUNDS, "temperature": (0, 100), "routed_experts": (0, 1)}
"""The least and the greatest value that can be pinned: those of a request, except for the greatest
temperature, which is 2 only in the agents' dialects."""
_WHOLE = WHOLE | {"routed_experts"}
UNTRAINABLE = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that no trainer computes probabilities with, and their values that change nothing."""
GRAMMAR_TOP_K = 16
"""Of answers with a grammar in training whose session pins none: so that all that was left can be
recorded, of which a grammar alone leaves too much. The 4 more that are recorded are for equal
logits."""


def resolve(
    session: Session,
    options: Options,
    *,
    prompt_tokens: int,
    context_tokens: int | None,
    stop_token_ids: tuple[int, ...],
    policy: str = "",
    conversation: Conversation | None = None,
    sibling: int = 0,
    routed_tokens: int = 0,
    structured: dict[str, Any] | None = None,
) -> Sampling:
    """`conversation` is what the prompt says, and `structured` the grammar of the whole answer.
    `sibling` is an answer's index among the `n` of a call; it is added to the seed, so that a
    pinned or requested seed does not make all answers equal. `routed_tokens` is the number of
    tokens of the prompt whose routed experts are recorded.

    Raises:
        ContextOverflow: the prompt leaves no room for a token.
    """
    values: dict[str, Any] = {}
    if session.kind is SessionKind.EVAL:
        given = zip(_BENDING, _bending(options), strict=True)
        values = {name: value for name, value in given if value is not None}
    values |= {k: v for k, v in session.sampling.items() if k in _BENDING}
    if 0 < values.get("temperature", 1) < COLDEST:
        values["temperature"] = COLDEST  # the record says what was sampled
    pinned = session.sampling.get("alternatives", 0)
    if structured is not None and session.kind is SessionKind.TRAIN:
        if values.get("top_k", -1) <= 0:
            values["top_k"] = GRAMMAR_TOP_K
        pinned = MAX_ALTERNATIVES
    if sibling and "seed" in values:
        values["seed"] += sibling
    return Sampling(
        max_tokens=_max_tokens(session.sampling, options, prompt_tokens, context_tokens),
        stop=options.stop,
        stop_token_ids=stop_token_ids,
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        alternatives=max(pinned, options.top_logprobs),
        pinned_alternatives=pinned,
        structured=structured,
        trained=session.kind is SessionKind.TRAIN,
        policy=policy,
        conversation=conversation,
        experts_from=routed_tokens if session.sampling.get("routed_experts") else None,
        **values,
    )


def seed_of_call(session_seed: int, prompt: Ids, asked_before: int, choice: int) -> int:
    """The seed of an answer of a session whose seed is pinned, in `[0, 2**31)`. It depends on what
    the model is given, and not on the order in which the session's calls arrive. `asked_before`:
    how often the session has had this prompt answered; `choice`: as `sibling` of `resolve`."""
    key = f"{session_seed}:{asked_before}:{choice}:".encode()
    digest = hashlib.blake2b(key + prompt.astype("<i4", copy=False).tobytes(), digest_size=4)
    return int.from_bytes(digest.digest(), "little") >> 1


def check_pinned(sampling: Mapping[str, Any], kind: SessionKind) -> dict[str, Any]:
    """Checks the sampling parameters given when a session is created. Raises RequestError."""
    for name, value in sampling.items():
        if name not in PINNABLE:
            raise RequestError(
                f"sampling.{name} is not known; use one of {', '.join(sorted(PINNABLE))}",
                param="sampling",
            )
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(f"sampling.{name}: expected a number, got {value!r}")
        low, high = _BOUNDS.get(name, (-math.inf, math.inf))
        if not low <= value <= high or (name in _WHOLE and value != int(value)):
            whole = "an integer" if name in _WHOLE else "a number"
            raise RequestError(
                f"sampling.{name}: expected {whole} from {low} to {high}, got {value}",
                param="sampling",
            )
    if 0 < sampling.get("temperature", 1) < COLDEST:
        raise RequestError(
            f"sampling.temperature: engines sample at {COLDEST} instead of"
            f" {sampling['temperature']}; use 0, or at least {COLDEST}",
            param="sampling",
        )
    if kind is SessionKind.TRAIN and (bent := next(untrainable(sampling), None)) is not None:
        raise RequestError(
            f"sampling.{bent}: {sampling[bent]} in a session of kind train, whose tokens could not"
            f" be trained: no trainer computes probabilities with it; use {UNTRAINABLE[bent]}, or"
            " kind eval, which is never trained",
            param="sampling",
        )
    count = sampling.get("alternatives", 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_ALTERNATIVES:
        raise RequestError(
            f"sampling.alternatives: expected an integer from 0 to {MAX_ALTERNATIVES}, got {count}",
            param="sampling",
        )
    return dict(sampling)


def untrainable(sampling: Mapping[str, Any]) -> Iterator[str]:
    """The parameters with which the tokens that are sampled cannot be trained."""
    return (name for name, plain in UNTRAINABLE.items() if sampling.get(name, plain) != plain)


def as_record(sampling: Sampling) -> dict[str, Any]:
    """The parameters that the engine got, as a `Turn` records them."""
    values = zip(_RECORDED, _recorded(sampling), strict=True)
    fields = {name: value for name, value in values if value is not None}
    if sampling.policy:
        fields["policy"] = sampling.policy
    if sampling.pinned_alternatives:
        fields["alternatives"] = sampling.pinned_alternatives
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


def _max_tokens(
    pinned: Mapping[str, Any], options: Options, prompt_tokens: int, context_tokens: int | None
) -> int:
    limits = [options.max_tokens, pinned.get("max_tokens")]
    if context_tokens is not None:
        room = context_tokens - prompt_tokens
        if room < 1:
            raise ContextOverflow(prompt_tokens, context_tokens)
        limits.append(room)
    known = [int(limit) for limit in limits if limit is not None]
    return min(known) if known else DEFAULT_MAX_TOKENS


DEFAULT_MAX_TOKENS = 4096
"""Used when neither the agent, the session nor the context length limits the answer."""
