"""The bodies of the control plane's requests and responses, as in the OpenAPI document.

Requests are parsed with these models, and unknown keys are refused. Responses are written without
them; the tests validate every response against its model, so that the document is correct.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    ValidationError,
)

from proxy.engines.registry import ENGINES
from proxy.errors import RequestError
from proxy.http.openapi import Schema
from proxy.records import (
    POLICY_NAME,
    BranchMode,
    FinishReason,
    ForkCause,
    Origin,
    RuleAction,
    SessionKind,
    SessionStatus,
    TurnStatus,
)
from proxy.routing.policies import MAX_ADAPTER_CHARS

M = TypeVar("M", bound=BaseModel)
MAX_TTL_S = 10 * 365 * 86400.0
MAX_BODY_BYTES = 2**20
"""A control call's body; validating it takes some milliseconds."""
MAX_MODEL_CHARS = 256
MAX_POLICIES = 64
"""Number of model names that a session maps to policies."""
MAX_QUOTA_CHARS = 128
_SHOWN_CHARS = 80


def _can_be_stored(value: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"cannot be stored: {error}") from error
    return value


_STORED = AfterValidator(_can_be_stored)
"""JSON can hold integers beyond 64 bits, which cannot be stored."""


def check_policy(name: str) -> str:
    """Returns the name of a policy. Raises ValueError if it is not one."""
    if not POLICY_NAME.fullmatch(name):
        raise ValueError(
            f"{name[:_SHOWN_CHARS]!r} is not a name of a policy: use 1 to 64 characters of A-Z a-z "
            "0-9 . _ -, the first a letter or a digit"
        )
    return name


def _are_policies(policies: dict[str, str]) -> dict[str, str]:
    for model, policy in policies.items():
        if len(model) > MAX_MODEL_CHARS:
            raise ValueError(
                f"the model name {model[:_SHOWN_CHARS]!r}… has {len(model)} characters, at most "
                f"{MAX_MODEL_CHARS} are allowed"
            )
        if policy:
            check_policy(policy)
    return policies


class SessionLimits(Schema):
    """Limits of one session; None for the configuration's limit."""

    max_turns: int | None = Field(None, ge=1, le=2**53)
    max_tokens: int | None = Field(None, ge=1, le=2**53)
    """Number of sampled tokens."""
    max_concurrent_calls: int | None = Field(None, ge=1, le=2**53)
    quota: str | None = Field(None, min_length=1, max_length=MAX_QUOTA_CHARS)
    """The name of a quota that the session shares with others (`PUT /quotas/{name}`)."""


class Curation(Schema):
    """Body of `POST /sessions/{trial_id}/curation`: what a person says of a session."""

    value: FiniteFloat | None = None
    """The rating: the reward `rating`, in place of an earlier one."""
    comment: str = ""
    tags: dict[str, str] = Field(default_factory=dict)
    """Entries of the metadata to set; an empty text removes one."""


class BranchOf(Schema):
    """Where a branch begins: the `turn` first turns of `session` are replayed to its agent."""

    session: str
    turn: int = Field(ge=1, le=2**31 - 1)
    mode: BranchMode = BranchMode.STRICT
    salvage: bool = False
    """Whether the branch continues a failed trial and trains the turns of `session`, too."""
    system: str | None = None
    """The system message of the calls after the recorded ones, instead of the agent's."""
    answer: str | None = None
    """Text that answers the first of these calls, instead of the engine."""

    @property
    def origin(self) -> Origin:
        return Origin(self.session, self.turn, self.mode, self.salvage, self.system, self.answer)


class NewSession(Schema):
    """Body of `POST /sessions`. A branch (`from`) takes over what it does not set of the other
    session's kind, sampling, profile and limits; its profile is always the same."""

    branch_of: BranchOf | None = Field(None, alias="from")

    trial_id: str | None = None
    kind: SessionKind | None = None
    """Default: `train`, or `eval` if all engines only return text."""
    sampling: Annotated[dict[str, int | FiniteFloat], _STORED] = Field(default_factory=dict)
    policies: Annotated[dict[str, str], AfterValidator(_are_policies)] = Field(
        default_factory=dict, max_length=MAX_POLICIES
    )
    """Model name that the agent may request → policy that samples; the model name `""` stands for
    all others. Without it, the engines' own weights sample."""
    profile: str = "default"
    limits: SessionLimits = Field(default_factory=SessionLimits)
    metadata: Annotated[dict[str, Any], _STORED] = Field(default_factory=dict)
    ttl_s: float | None = Field(None, ge=1, le=MAX_TTL_S)


MAX_REWARD_KEY_CHARS = 500
"""An entry of an index of PostgreSQL has at most 2,704 bytes, with the session's id."""


class NewReward(Schema):
    """Body of `POST /sessions/{id}/rewards`. Without `turn`, the reward is the session's."""

    key: str = Field("reward", max_length=MAX_REWARD_KEY_CHARS)
    value: float = Field(allow_inf_nan=False)
    parts: dict[str, FiniteFloat] = Field(default_factory=dict)
    turn: int | None = Field(None, ge=0, le=2**31 - 1)
    branch: bool = False


_KINDS: list[JsonValue] = [*sorted(ENGINES)]


def _known_kind(kind: str) -> str:
    """Accepts built-in kinds only; an import path may only come from the configuration file."""
    if kind not in ENGINES:
        raise ValueError(f"unknown kind; use one of {', '.join(sorted(ENGINES))}")
    return kind


class NewEngine(Schema):
    """Body of `POST /engines`."""

    url: str
    kind: Annotated[str, AfterValidator(_known_kind)] = Field(
        "vllm", json_schema_extra={"enum": _KINDS}
    )
    name: str | None = None
    model: str | None = None
    api_key: str | None = None


class Version(Schema):
    """The version of the engines' weights: body and answer of `PUT /policy_version`."""

    version: int = Field(ge=0, le=2**31 - 1)


class PolicyVersion(Schema):
    """The version of a policy that is sampled from: body of `PUT /policies/{name}/version`."""

    version: int = Field(ge=0, le=2**31 - 1)
    adapter: str = Field(min_length=1, max_length=MAX_ADAPTER_CHARS)
    """The engines' name of the LoRA adapter of this version. Each version needs a name of its own,
    because engines keep keys and values by this name."""
    run: str = Field("", max_length=MAX_ADAPTER_CHARS)
    """The run that publishes it, to which the policy then belongs; empty: it belongs to none."""


class PolicyView(Schema):
    """A policy: its name, the version that is sampled from, that version's adapter, and the run to
    which it belongs."""

    name: str
    version: int
    adapter: str
    run: str


class SessionCreated(Schema):
    """Answer of `POST /sessions`. The key is shown only here. `expires_at` is in Unix seconds."""

    trial_id: str
    api_key: str
    base_url: str
    anthropic_base_url: str
    expires_at: float


class MarkView(Schema):
    """A search rule that a turn of the session matches. With the action `zero_reward`, the reward
    of the session is 0, whatever `rewards` has."""

    rule: str
    action: RuleAction
    turn: int
    at: float
    found: str


class SessionView(Schema):
    """A session without its turns. Times are in Unix seconds."""

    branch_of: BranchOf | None = Field(None, alias="from")

    trial_id: str
    kind: SessionKind
    status: SessionStatus
    created_at: float
    expires_at: float
    completed_at: float | None
    sampling: dict[str, int | float]
    profile: str
    limits: SessionLimits
    metadata: dict[str, Any]
    rewards: list[NewReward]
    marks: list[MarkView]


class SessionList(Schema):
    """Answer of `GET /sessions`."""

    sessions: list[SessionView]


class ImageView(Schema):
    """The tokens `[offset, offset + tokens)` are an image (`GET /sessions/{id}/images/SHA256`)."""

    offset: int
    """Of a turn: index among its new tokens. Of a trajectory: index in its `ids`."""
    tokens: int
    sha256: str


class TurnView(Schema):
    """One turn of a session, without its token ids."""

    index: int
    recorded_by: str | None
    """The session that recorded the turn, if it is another one: a branch's first turns."""
    parent: int | None
    fork_cause: ForkCause | None
    status: TurnStatus
    finish_reason: FinishReason | None
    dialect: str
    agent_id: str | None
    shared_tokens: int
    new_prompt_tokens: int
    sampled_tokens: int
    images: list[ImageView]
    versions: list[tuple[int, int, int]]
    sampling: dict[str, Any]
    answer: str | None
    started_at: float
    first_token_s: float | None
    duration_s: float | None


class ReplayView(Schema):
    """How far a branch has come in its recorded turns."""

    turns: list[int]
    """The recorded turns whose answers have reached its agent."""
    diverged: list[str]
    """One line for each request that is not the recorded one."""


class SessionRecord(SessionView):
    """Answer of `GET /sessions/{id}`: the session with its turns."""

    replay: ReplayView | None
    """None for a session that is not a branch."""
    turns: list[TurnView]


class TrajectoryView(Schema):
    """One path through the token tree. `ids`, `sampled` and `logprobs` have one entry per token."""

    turns: list[int]
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    images: list[ImageView]


class SessionTrajectories(SessionView):
    """JSON answer of `GET /sessions/{id}/trajectories`."""

    trajectories: list[TrajectoryView]


class Event(BaseModel):
    """An event. Its other fields depend on its kind."""

    model_config = ConfigDict(extra="allow")
    kind: str
    at: float
    seq: int | None = None
    """Only stored events have one; events about turns are sent but not stored."""


class Events(Schema):
    """Answer of `GET /sessions/{id}/events` when it is not a stream."""

    events: list[Event] | None = None
    completed: bool | None = None
    """Only in the response to a long poll (`wait=completed`)."""


class Added(Schema):
    """Answer of `POST /sessions/{id}/rewards`. False if the session has a reward with this key."""

    added: bool


class EngineView(Schema):
    """One engine. `in_flight` is its number of calls; `version` is that of its weights."""

    name: str
    url: str
    healthy: bool
    in_flight: int
    version: int
    reports_version: bool
    """Whether the engine reports its version; otherwise, `version` is not known."""
    model: str | None
    max_context_tokens: int | None
    cache_tokens: int | None
    """Number of tokens that the KV cache holds, if the engine reports it."""
    adapters: bool
    """Whether it samples with the LoRA adapters of policies."""
    images: bool | None
    """Whether it prepares images, and samples with them; null: it has not been asked yet."""
    text_only: bool
    details: dict[str, Any]


class Engines(Schema):
    """Answer of `GET /engines`."""

    engines: list[EngineView]
    policies: list[PolicyView]
    paused: bool


class EngineAdded(Schema):
    """Answer of `POST /engines`: the engine's name."""

    name: str


class Paused(Schema):
    """Answer of `POST /engines/pause` and `POST /engines/resume`."""

    paused: bool


class ProcessStatus(Schema):
    """Answer of `GET /health` and `GET /ready`."""

    status: str


def parsed(model: type[M], body: bytes, most_bytes: int = MAX_BODY_BYTES) -> M:
    """Parses a request's body of at most `most_bytes`. Raises RequestError with the field, its
    value and what was expected."""
    if len(body) > most_bytes:
        raise RequestError(
            f"the request body has {len(body)} bytes; this call may have {most_bytes}; "
            "keep large data elsewhere and send its name",
            status=413,
        )
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        shown = repr(first["input"])[:_SHOWN_CHARS]
        raise RequestError(f"{field}: {first['msg']}, got {shown}", param=field) from error
