"""The records of the proxy: one `Turn` per model call, in one `Session` per trial.

A session's turns form the **token tree**. A turn holds only the tokens that it adds:

    path(turn) = path(turn.parent)[: turn.shared_tokens] + turn.prompt_ids + turn.sampled_ids

so `path(turn)` without its `sampled_ids` is exactly the prompt that the engine got, and
`sampled_ids` is exactly what it returned; but the tokens of an image are numbers below 0
(`records.images`). A turn *extends* its parent if `shared_tokens` covers the
parent's whole path, and *forks* from it otherwise; every fork has a cause. A *branch* is a session
whose first turns are another session's (`Origin`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from struct import pack
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
"""Token ids, `[T]`."""
Logprobs = npt.NDArray[np.float32]
"""Natural-log probabilities under the distribution that was sampled, `[T]`."""

RoutedExperts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
"""The experts that a router chose, `[R, layers, k]`: for each token and layer, in any order. Layers
without experts have 0."""

ALTERNATIVE = np.dtype([("id", "<i4"), ("logprob", "<f4")])
Alternatives = npt.NDArray[np.void]
"""The most probable tokens at sampled positions, `[S, N]` of `ALTERNATIVE`, each row in descending
order. A row of fewer tokens ends with ids -1 of log-probability minus infinity."""

EMPTY_IDS: Ids = np.zeros(0, np.int32)
EMPTY_LOGPROBS: Logprobs = np.zeros(0, np.float32)


def ids_of(tokens: Sequence[int]) -> Ids:
    """A read-only array of a list's ids. NumPy itself takes twice the time, because it looks at
    each value's type."""
    return np.frombuffer(pack(f"{len(tokens)}i", *tokens), np.int32)


def logprobs_of(values: Sequence[float]) -> Logprobs:
    """The same for finite or NaN log-probabilities."""
    return np.frombuffer(pack(f"{len(values)}f", *values), np.float32)


FOLDER = "folder"
"""The entry of a session's metadata that names the folder in which its agent works."""
GIT_BRANCH = "git_branch"
"""The entry that names the branch of the repository that the folder is in."""


class SessionKind(StrEnum):
    """Whether a session's tokens are for training or for evaluation."""

    TRAIN = "train"
    """The trainer's sampling parameters override the agent's."""
    EVAL = "eval"
    """The agent's own sampling parameters apply, and no token is ever trained."""


class SessionStatus(StrEnum):
    """Whether a session accepts calls."""

    OPEN = "open"
    COMPLETED = "completed"
    """Ended by its owner; further calls get 409."""
    EXPIRED = "expired"
    """Past its `expires_at`; further calls get 410."""


class TurnStatus(StrEnum):
    """How far a turn has come, or how it ended. Only `DONE` turns are trained."""

    OPEN = "open"
    """The intent is recorded and the engine may be sampling. After a crash it becomes CUT."""
    DONE = "done"
    """Sampled to the end, and committed before the terminal event was sent."""
    CUT = "cut"
    """It or another answer of its call was interrupted (client disconnected, engine failed, …)."""
    SUPERSEDED = "superseded"
    """Answered, but the agent did not receive the answer and retried: kept, never trained."""
    CONTEXT = "context"
    """Answered, but not trained here: another session's record trains it (see `Origin`), or the
    answer was given by hand instead of sampled."""


class FinishReason(StrEnum):
    """Why the engine stopped. `CUT` is never sent to an agent."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CUT = "cut"


class ForkCause(StrEnum):
    """Why a request did not extend the recorded path that it is closest to."""

    EDITED = "edited"
    """A recorded message came back with other content."""
    ROLLED_BACK = "rolled_back"
    """The request continues an earlier turn that other turns have already continued."""
    TOOL_ARGUMENTS = "tool_arguments"
    """The recorded answer came back with other arguments in its tool calls."""
    CALLS_CHANGED = "calls_changed"
    """The recorded answer came back with other tool calls: some are missing, added or renamed."""
    TEXT_DROPPED = "text_dropped"
    """The recorded answer came back without the text that accompanied its tool calls."""
    WHITE_SPACE = "white_space"
    """The recorded answer came back with different white space within its text: line endings, or
    text blocks that were split or joined."""
    TOOLS_CHANGED = "tools_changed"
    """The agent's tools differ from those of the recorded request."""
    IMAGE_CHANGED = "image_changed"
    """A recorded message came back with another image: one that was encoded again, or resized."""
    SYSTEM_CHANGED = "system_changed"
    """The leading system messages differ from those of the recorded request."""
    REASONING_DROPPED = "reasoning_dropped"
    """Sampled reasoning is missing, and the session's profile follows the agent."""
    REASONING_CHANGED = "reasoning_changed"
    """Sampled reasoning came back changed, and the session's profile follows the agent."""
    REASONING_MOVED = "reasoning_moved"
    """Sampled reasoning came back within the answer's text."""
    COMPACTION = "compaction"
    """The history was replaced by a summary."""
    FOREIGN_ASSISTANT = "foreign_assistant"
    """The history has an assistant message that the policy did not sample."""
    UNPROVABLE_BRIDGE = "unprovable_bridge"
    """The renderer could not show that the new prompt starts with the recorded tokens."""
    NEW_CONVERSATION = "new_conversation"
    """Shares at most the tokens of the template and the system prompt: a sub-agent or side call."""
    SIBLING = "sibling"
    """Another sample (`n` > 1, or a retry) of a prompt that was sampled before."""
    CALL_REQUIRED = "call_required"
    """The answer ended without the tool call that the agent requires, and goes on with one."""
    DIVERGED = "diverged"
    """In a branch: the agent's request is not the one that was recorded at this point."""


class BranchMode(StrEnum):
    """What happens in a branch to a request that is not the recorded one."""

    STRICT = "strict"
    """The call is refused with the difference, and so are all later ones."""
    LIVE = "live"
    """The answer is sampled, and the turn forks with the cause `DIVERGED`."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a branch begins: its first turns are another session's, by reference.

    The turns of a branch with an index below `turn` are those of the session `session_id`, which
    has recorded and stored them. They keep that `session_id` and their index, and are CONTEXT in
    the branch, because the other session trains them.

    Example: Origin("sum-17-9fJq", turn=7), whose turns 0 to 6 are answered from the recording
    """

    session_id: str
    turn: int
    """Number of turns that the branch refers to; turn `turn` is the first one of its own."""
    mode: BranchMode = BranchMode.STRICT
    salvage: bool = False
    """The branch continues a failed trial: it trains the turns to which it refers, and they are
    CONTEXT in the other session. A session is salvaged at most once."""
    system: str | None = None
    """The system message of the calls that are sampled, instead of the agent's own."""
    answer: str | None = None
    """The text that answers the first call after the recorded ones, as if it had been sampled."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens `[start, end)` of a turn were sampled with the weights of `version`.

    Example: an answer of 9 tokens during which the weights changed once:
        (VersionSpan(4, 0, 6), VersionSpan(5, 6, 9))
    """

    version: int
    start: int
    end: int


class ImageSpan(msgspec.Struct, frozen=True):
    """The tokens `[offset, offset + tokens)` of a prompt are an image.

    Example: ImageSpan(offset=5, tokens=6, token=151655, digest="4aeb5f…", sha256="9f86d0…",
                       grid=(1, 4, 6))
    """

    offset: int
    """Of a turn: index in its `prompt_ids`. Of a prompt or a path: index in that."""
    tokens: int
    """At least 1."""
    token: int
    """The id that the engine gets for each of them (`image_token_id` of config.json)."""
    digest: str
    """sha256 of the pixels and all else that the model's processor made of the image, in
    hexadecimal: what the image is called in the engine."""
    sha256: str
    """Of the bytes that the agent sent, in hexadecimal."""
    grid: tuple[int, ...] = ()
    """Patches in time, height and width (`image_grid_thw`); empty for a model without it."""


class RecordedImage(msgspec.Struct, frozen=True):
    """An image that an agent sent, which the store has once.

    Example: RecordedImage("9f86d0…", "image/png", b"\\x89PNG…")
    """

    sha256: str
    """Of `data`, in hexadecimal."""
    media_type: str
    """What `data` is, whatever the request says."""
    data: bytes
    """As the agent sent it."""


class Turn(msgspec.Struct, frozen=True):
    """One model call from request to answer. (A struct, which is made in C, because each call makes
    two of them.)

    Example: the second call of a trial, after a tool's result of 12 tokens:
        Turn(session_id="t-1", index=1, parent=0, shared_tokens=350, fork_cause=None,
             prompt_ids=[12 ids], sampled_ids=[30 ids], logprobs=[30 floats],
             versions=(VersionSpan(3, 0, 30),), finish_reason=FinishReason.TOOL_CALLS,
             status=TurnStatus.DONE, ...)
    where 350 is all of turn 0's path, so that turn 1's prompt is 362 tokens long.
    """

    session_id: str
    """The session that recorded it; in a branch, that of an `Origin` for the first turns."""
    index: int
    """Order of arrival in the session, from 0."""
    parent: int | None
    """Index of the turn whose path this one shares; None for a root."""
    shared_tokens: int
    """Number of tokens of the parent's path that this turn's prompt starts with."""
    fork_cause: ForkCause | None
    """None for a session's first turn, and for a turn that extends its parent's whole path."""
    prompt_ids: Ids
    """The prompt's ids after the shared ones, `[P]`."""
    request_key: bytes
    """Stored form of the key of the canonical conversation (`conversation.message_keys`); a retry
    has the same key."""
    sampling: Mapping[str, Any]
    """The sampling parameters that the engine got."""
    dialect: str = "chat"
    request: bytes = b""
    """The messages and tools that the request adds, as dialect-independent JSON
    (`conversation.recorded`); empty for a prompt without messages."""
    sampled_ids: Ids = EMPTY_IDS
    """The ids that the engine returned, `[S]`."""
    logprobs: Logprobs = EMPTY_LOGPROBS
    """`[S]`, one per sampled id."""
    versions: tuple[VersionSpan, ...] = ()
    """Versions of the weights; the spans cover `[0, S)` without gap or overlap."""
    finish_reason: FinishReason | None = None
    status: TurnStatus = TurnStatus.OPEN
    answer_key: bytes = b""
    """Key of the conversation with the answer appended, by which a continuation is found. Empty
    until something was sampled."""
    answer: bytes = b""
    """The assistant message sent to the agent, as dialect-independent JSON; replayed to a retry."""
    agent_id: str | None = None
    """The sub-agent that made the call, from the headers that its profile names."""
    started_at: float = 0.0
    """Unix seconds."""
    first_token_s: float | None = None
    """Seconds from the request to the first sampled token."""
    duration_s: float | None = None
    engine: str = ""
    """Name of the engine that sampled the last token; empty: no engine sampled one, or an earlier
    program recorded the turn."""
    routed_experts: RoutedExperts | None = None
    """The experts of `R` tokens of the path: `[path_tokens - 1 - R, path_tokens - 1)`. They begin
    at the latest where the rows of the turns before this one end, and the last sampled token has
    none, because no forward pass had it as an input yet. None: not recorded."""
    alternatives: Alternatives | None = None
    """`[S, N]`, the tokens from which each sampled one was chosen. The sampled one is among them if
    it is one of the `N` most probable. None: not recorded."""
    images: tuple[ImageSpan, ...] = ()
    """The images in `prompt_ids`, in order."""

    @property
    def policy(self) -> str:
        """The policy that sampled the answer; empty: the engines' own weights."""
        return str(self.sampling.get("policy", ""))

    @property
    def prompt_tokens(self) -> int:
        return self.shared_tokens + len(self.prompt_ids)

    @property
    def path_tokens(self) -> int:
        return self.prompt_tokens + len(self.sampled_ids)

    @property
    def sampled(self) -> bool:
        """Whether the turn has tokens that may be trained, if the session is a TRAIN session."""
        return self.status is TurnStatus.DONE and len(self.sampled_ids) > 0


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that was reported for a session; at most one per `key`.

    Example: Reward(key="verifier", value=1.0, parts={"tests": 1.0, "style": 0.5}, turn=None)
    """

    key: str
    value: float
    """Finite; the control API refuses NaN and infinities."""
    parts: Mapping[str, float] = field(default_factory=dict)
    turn: int | None = None
    """None: for the whole trial. Otherwise for this turn, or for the branch that ends with it."""
    branch: bool = False
    """With `turn`: for every turn on that turn's path instead of that turn alone."""


REFUSED = "refused"
"""The kind of the event of a call that was answered with an error: `route`, `status`, `message`."""
TRIAL_REWARD = "trial"
"""The key of the reward that a trial got in the end, of which others may be parts."""


class RuleAction(StrEnum):
    """What happens to a session when a turn of it matches a search rule."""

    MARK = "mark"
    """It is marked, and nothing else."""
    END = "end"
    """It is also completed: later calls get 409."""
    ZERO_REWARD = "zero_reward"
    """Its reward is also 0, whatever was reported for it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A search rule that a turn of a session matches; at most one per rule.

    Example: Mark("edits-tests", RuleAction.ZERO_REWARD, turn=3, at=1.78e9, found="sed -i …")
    """

    rule: str
    action: RuleAction
    turn: int
    """The first turn that was found to match."""
    at: float
    """Unix seconds."""
    found: str = ""
    """The beginning of the text that matched; empty if the rule asks for no text."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What all sessions whose limits name it may use together.

    Example: Quota("team-a", max_turns=100_000, max_tokens=None, turns=512, tokens=80_000)
    """

    name: str
    max_turns: int | None
    """None: no limit."""
    max_tokens: int | None
    """Sampled tokens; None: no limit."""
    turns: int = 0
    """Turns that were begun, without those that ended before their first token."""
    tokens: int = 0
    """Tokens of the turns that have ended."""


@dataclass(slots=True)
class Session:
    """The recorded traffic of one trial.

    Example: Session(session_id="task-7-9fJq", key_hash=b"…", kind=SessionKind.TRAIN,
                     status=SessionStatus.OPEN, created_at=1.78e9, expires_at=1.78e9 + 3600,
                     sampling={"temperature": 1.0})
    """

    session_id: str
    """Also the trial's id. Any text; it may contain `/`."""
    key_hash: bytes
    """SHA-256 of the API key; the key itself is not stored."""
    kind: SessionKind
    status: SessionStatus
    created_at: float
    expires_at: float
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that override the agent's own. `policies` maps the model names that the
    agent may request to policies; the name "" stands for every other model name."""
    profile: str = "default"
    """Name of the agent profile (see `proxy/profiles.yaml`)."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """`max_turns`, `max_tokens`, `max_concurrent_calls`; an absent one has the proxy's default.
    `quota` names a quota that the session shares with others."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    rewards: list[Reward] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    completed_at: float | None = None
    origin: Origin | None = None
    """None, except for a branch."""

    @property
    def recorded_turns(self) -> int:
        """Number of turns that a branch refers to; 0 for any other session."""
        return 0 if self.origin is None else self.origin.turn

    @property
    def quota(self) -> str:
        """The name of the quota that it shares with other sessions; empty: none."""
        return str(self.limits.get("quota", ""))

    @property
    def reward(self) -> float | None:
        """Of the whole trial: 0 if a search rule says so; else what its grader found, or the sum of
        what was reported. None if there is neither."""
        if self.marked(RuleAction.ZERO_REWARD) is not None:
            return 0.0
        whole = {reward.key: reward.value for reward in self.rewards if reward.turn is None}
        return whole.get(TRIAL_REWARD, sum(whole.values())) if whole else None

    def marked(self, action: RuleAction) -> Mark | None:
        """The first mark of a rule with this action."""
        return next((mark for mark in self.marks if mark.action is action), None)

    def policy_of(self, model: str) -> str:
        """The policy of calls that request this model name; empty: the engines' own weights."""
        policies: Mapping[str, str] = self.sampling.get("policies", {})
        return policies.get(model, policies.get("", ""))


POLICY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A policy's name. No `@`, which separates it from the version in the engines' names of
adapters."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """The current version of a policy.

    Example: ServedPolicy("planner", version=7, adapter="planner@7.3fa9c2")
    """

    name: str
    version: int
    adapter: str
    """The name of this version in the engines."""
    run: str = field(default="", compare=False)
    """The run to which the policy belongs; empty: to none."""
