"""What the engine is asked for: the session's pinned parameters against the agent's own.

Invariant: in a TRAIN session every parameter that bends the distribution is the trainer's (pinned
in the session, else neutral), whatever the agent sends: the recorded log-probabilities are then
those that the trainer can compute again. EVAL honours the agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.engines.protocol import Sampling
from proxy.errors import ContextOverflow, RequestError
from proxy.records import Session, SessionKind
from proxy.wire.dialect import Options

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
PINNABLE = frozenset((*_BENDING, "max_tokens"))


def resolve(
    session: Session,
    options: Options,
    *,
    prompt_tokens: int,
    context_tokens: int | None,
    stop_token_ids: tuple[int, ...],
    sibling: int = 0,
) -> Sampling:
    """`sibling` numbers the answers of an `n` > 1, so that a seed does not make them all one.

    Raises:
        ContextOverflow: no token fits behind the prompt.
    """
    values: dict[str, Any] = {}
    if session.kind is SessionKind.EVAL:
        values = {name: getattr(options, name) for name in _BENDING}
    values.update({k: v for k, v in session.sampling.items() if k in _BENDING})
    values = {name: value for name, value in values.items() if value is not None}
    if sibling and "seed" in values:
        values["seed"] += sibling
    return Sampling(
        max_tokens=_max_tokens(session.sampling, options, prompt_tokens, context_tokens),
        stop=options.stop,
        stop_token_ids=stop_token_ids,
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
        structured=options.structured,
        trained=session.kind is SessionKind.TRAIN,
        **values,
    )


def check_pinned(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """A session's sampling parameters as given at its creation. Raises RequestError."""
    for name, value in sampling.items():
        if name not in PINNABLE:
            raise RequestError(
                f"sampling.{name}: one of {', '.join(sorted(PINNABLE))} is wanted", param="sampling"
            )
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(f"sampling.{name}: a number is wanted, not {value!r}")
    return dict(sampling)


def as_record(sampling: Sampling) -> dict[str, Any]:
    """What a `Turn` keeps: the parameters as the engine was given them."""
    fields = {
        name: getattr(sampling, name)
        for name in ("max_tokens", *_BENDING, "structured")
        if getattr(sampling, name) is not None
    }
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
"""Where neither the agent, the session nor the context says how long an answer may get."""
