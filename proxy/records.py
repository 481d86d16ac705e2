"""What the proxy records: one `Turn` per model call, in one `Session` per trial.

A session's turns form the **token tree**. A turn holds only the tokens that it adds:

    path(turn) = path(turn.parent)[: turn.shared_tokens] + turn.prompt_ids + turn.sampled_ids

so `path(turn)` without its `sampled_ids` is exactly what the engine was given, and `sampled_ids`
exactly what it gave back. A turn *extends* its parent when `shared_tokens` is the whole of the
parent's path, and *forks* from it otherwise; every fork carries its cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, `[T]`."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities under the distribution that was sampled, `[T]`."""

EMPTY_IDS: Ids = np.zeros(0, np.int32)
EMPTY_LOGPROBS: Logprobs = np.zeros(0, np.float32)


class SessionKind(StrEnum):
    TRAIN = "train"
    """The trainer's sampling parameters are pinned over the agent's."""
    EVAL = "eval"
    """The agent's own sampling parameters are honoured, and no token is ever trained."""


class SessionStatus(StrEnum):
    OPEN = "open"
    COMPLETED = "completed"
    """Closed by its owner: further calls get 409."""
    EXPIRED = "expired"
    """Outlived `expires_at`: further calls get 410."""


class TurnStatus(StrEnum):
    OPEN = "open"
    """Intent is on disk and the engine may be sampling. After a restart: known to be cut."""
    DONE = "done"
    """Sampled to its end and committed before the terminal event was sent."""
    CUT = "cut"
    """Ended before its end (client gone, engine died, proxy killed): kept, never trained."""
    SUPERSEDED = "superseded"
    """Answered, but the agent never took the answer and asked again: kept, never trained."""


class FinishReason(StrEnum):
    """Why the engine stopped. `CUT` is never shown to an agent as an answer."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CUT = "cut"


class ForkCause(StrEnum):
    """Why a request did not extend the recorded path that it came closest to."""

    EDITED = "edited"
    """A message that was already part of the path came back with other text."""
    ROLLED_BACK = "rolled_back"
    """The request continues from an earlier turn, past which the path had already grown."""
    TOOL_ARGUMENTS = "tool_arguments"
    """A recorded tool call came back with arguments that do not parse to the same value."""
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    REASONING_DROPPED = "reasoning_dropped"
    """Sampled reasoning is missing and the profile's policy is to follow the agent."""
    COMPACTION = "compaction"
    """The history was replaced by a summary."""
    FOREIGN_ASSISTANT = "foreign_assistant"
    """An assistant message that the policy did not sample."""
    UNPROVABLE_BRIDGE = "unprovable_bridge"
    """The renderer could not show that the new prompt starts with the recorded tokens."""
    NEW_CONVERSATION = "new_conversation"
    """Shares at most the template's and the system's tokens: a sub-agent or a side call."""
    SIBLING = "sibling"
    """One more sample (`n` > 1, or a retry) of a prompt that was sampled already."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `[start, end)` of a turn came from the weights of `version`.

    Example: an answer of 9 tokens during which the weights changed once:
        (VersionSpan(4, 0, 6), VersionSpan(5, 6, 9))
    """

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Turn:
    """One model call, request to answer.

    Example: the second call of a trial, after a tool's result of 12 tokens:
        Turn(session_id="t-1", index=1, parent=0, shared_tokens=350, fork_cause=None,
             prompt_ids=[12 ids], sampled_ids=[30 ids], logprobs=[30 floats],
             versions=(VersionSpan(3, 0, 30),), finish_reason=FinishReason.TOOL_CALLS,
             status=TurnStatus.DONE, ...)
    where 350 is all of turn 0's path, so that turn 1's prompt is 362 tokens long.
    """

    session_id: str
    index: int
    """Order of arrival in the session, from 0."""
    parent: int | None
    """Index of the turn whose path this one shares; None for a root."""
    shared_tokens: int
    """How many tokens of the parent's path this turn's prompt starts with."""
    fork_cause: ForkCause | None
    """None for a session's first turn and for one that extends its parent's whole path."""
    prompt_ids: Ids
    """The prompt's tokens after the shared ones, `[P]`."""
    request_key: bytes
    """Digest of the canonical conversation that was asked about; equal for a retry."""
    sampling: Mapping[str, Any]
    """Sampling parameters as the engine was given them."""
    dialect: str = "chat"
    sampled_ids: Ids = field(default_factory=lambda: EMPTY_IDS)
    """What the engine gave back, `[S]`."""
    logprobs: Logprobs = field(default_factory=lambda: EMPTY_LOGPROBS)
    """`[S]`, one per sampled id."""
    versions: tuple[VersionSpan, ...] = ()
    """Cover `[0, S)` without gap or overlap."""
    finish_reason: FinishReason | None = None
    status: TurnStatus = TurnStatus.OPEN
    answer_key: bytes = b""
    """Digest of the conversation with the answer appended: what a continuation is matched by."""
    answer: bytes = b""
    """The assistant message that the agent was sent, as neutral JSON; served to a retried call."""
    agent_id: str | None = None
    """The caller within the session (sub-agents), from the headers that its family sends."""
    started_at: float = 0.0
    """Unix seconds."""
    first_token_s: float | None = None
    """Seconds from the request to the first sampled token."""
    duration_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + len(self.prompt_ids)

    @property
    def path_tokens(self) -> int:
        return self.prompt_tokens + len(self.sampled_ids)

    @property
    def sampled(self) -> bool:
        """Whether the policy's tokens here may be trained (the session's kind decides the rest)."""
        return self.status is TurnStatus.DONE and len(self.sampled_ids) > 0


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that was reported for a session; idempotent by `key`.

    Example: Reward(key="verifier", value=1.0, parts={"tests": 1.0, "style": 0.5}, turn=None)
    """

    key: str
    value: float
    """Finite; the control API refuses NaN and infinities."""
    parts: Mapping[str, float] = field(default_factory=dict)
    turn: int | None = None
    """None: for the whole trial. Else for this turn, or for the branch that ends in it."""
    branch: bool = False
    """With `turn`: for every turn on that turn's path rather than for it alone."""


@dataclass(slots=True)
class Session:
    """The recorded traffic of one trial.

    Example: Session(session_id="task-7-9fJq", key_hash=b"…", kind=SessionKind.TRAIN,
                     status=SessionStatus.OPEN, created_at=1.78e9, expires_at=1.78e9 + 3600,
                     sampling={"temperature": 1.0})
    """

    session_id: str
    """Also the trial's id; opaque, may hold `/`."""
    key_hash: bytes
    """SHA-256 of the API key; the key itself is stored nowhere."""
    kind: SessionKind
    status: SessionStatus
    created_at: float
    expires_at: float
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Pinned over the agent's own parameters in a TRAIN session."""
    profile: str = "default"
    """Name of the agent profile (matching, scrubbing, keep/follow)."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """`max_turns`, `max_tokens`, `max_concurrent_calls`; absent means the server's default."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rewards: list[Reward] = field(default_factory=list)
    completed_at: float | None = None
