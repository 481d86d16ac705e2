"""An agent's request and the keys that identify it."""

from __future__ import annotations

import msgspec

from proxy.branching.prefix import Recognised
from proxy.conversation.message_keys import Key, RawKey
from proxy.records import Ids
from proxy.serving.returned_calls import Recovered
from proxy.wire.dialect import Call


class Caller(msgspec.Struct, frozen=True):
    """The caller's data in the HTTP request's headers."""

    dialect: str
    arrived_at: float
    """`time.monotonic()` when the request's headers were read."""
    agent_id: str | None = None
    timeout_s: float | None = None
    """How long the client waits for an answer (`x-stainless-timeout`), if it sends that."""
    is_retry: bool = False
    """Whether the client marks the request as a retry (`x-stainless-retry-count` above 0)."""


class Asked(msgspec.Struct, frozen=True):
    """A request with its keys."""

    request: Call
    caller: Caller
    keys: list[Key]
    """One key per message of the conversation."""
    request_key: Key
    opening: Ids
    """The answer's first tokens, which are not sampled: a forced call's opening, or a prefill."""
    policy: str = ""
    """The policy that the session maps the requested model name to."""
    tidied: tuple[Recovered, ...] = ()
    """The recorded calls of the history that the agent's client has tidied."""
    recognised: Recognised | None = None
    """In a branch: how much of the request is recorded."""


def required_tool(request: Call) -> str | None:
    """The tool that a forced call must call; None for any of several."""
    tools, forced = request.conversation.tools, request.options.forced
    if forced is not None and forced.name is not None:
        return forced.name
    return str(tools[0]["function"]["name"]) if len(tools) == 1 else None


def request_key(asked: Key, request: Call, policy: str) -> Key:
    """The request's key: a policy, a forced call or a prefill makes it another request."""
    if policy:
        asked = asked.begun("policy", policy)
    forced, prefill = request.options.forced, request.conversation.prefill
    if isinstance(asked, RawKey):
        return asked
    if forced is not None:
        return asked.begun("forced", forced.name or "")
    return asked if prefill is None else asked.begun("prefill", prefill)
