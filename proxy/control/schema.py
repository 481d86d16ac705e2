"""What goes over the control plane, as the OpenAPI document describes it.

Requests are parsed by these models, unknown keys refused. Answers are written without them; the
tests hold every answer against its model, so that the document says what is so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from proxy.errors import RequestError
from proxy.records import FinishReason, ForkCause, SessionKind, SessionStatus, TurnStatus

M = TypeVar("M", bound=BaseModel)
MAX_TTL_S = 10 * 365 * 86400.0
_SHOWN_CHARS = 80


def _can_be_stored(value: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"it cannot be stored: {error}") from error
    return value


_STORED = AfterValidator(_can_be_stored)
"""JSON may hold integers past 64 bits, which no store here does."""


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Limits(Schema):
    max_turns: int | None = Field(None, ge=1, le=2**53)
    max_tokens: int | None = Field(None, ge=1, le=2**53)
    """Sampled ones."""
    max_concurrent_calls: int | None = Field(None, ge=1, le=2**53)


class NewSession(Schema):
    trial_id: str | None = None
    kind: SessionKind = SessionKind.TRAIN
    sampling: Annotated[dict[str, int | FiniteFloat], _STORED] = Field(default_factory=dict)
    profile: str = "default"
    limits: Limits = Field(default_factory=Limits)
    metadata: Annotated[dict[str, Any], _STORED] = Field(default_factory=dict)
    ttl_s: float | None = Field(None, ge=1, le=MAX_TTL_S)


class NewReward(Schema):
    key: str = "reward"
    value: float = Field(allow_inf_nan=False)
    parts: dict[str, FiniteFloat] = Field(default_factory=dict)
    turn: int | None = Field(None, ge=0, le=2**31 - 1)
    branch: bool = False


class NewEngine(Schema):
    url: str
    kind: Literal["vllm", "completions", "sglang", "text"] = "vllm"
    name: str | None = None
    model: str | None = None
    api_key: str | None = None


class Version(Schema):
    version: int = Field(ge=0, le=2**31 - 1)


class SessionCreated(Schema):
    trial_id: str
    api_key: str
    base_url: str
    anthropic_base_url: str
    expires_at: float


class SessionView(Schema):
    trial_id: str
    kind: SessionKind
    status: SessionStatus
    created_at: float
    expires_at: float
    completed_at: float | None
    sampling: dict[str, int | float]
    profile: str
    limits: Limits
    metadata: dict[str, Any]
    rewards: list[NewReward]


class SessionList(Schema):
    sessions: list[SessionView]


class TurnView(Schema):
    index: int
    parent: int | None
    fork_cause: ForkCause | None
    status: TurnStatus
    finish_reason: FinishReason | None
    dialect: str
    agent_id: str | None
    shared_tokens: int
    new_prompt_tokens: int
    sampled_tokens: int
    versions: list[tuple[int, int, int]]
    sampling: dict[str, Any]
    answer: str | None
    started_at: float
    first_token_s: float | None
    duration_s: float | None


class SessionRecord(SessionView):
    turns: list[TurnView]


class Trajectory(Schema):
    turns: list[int]
    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]


class SessionTrajectories(SessionView):
    trajectories: list[Trajectory]


class Event(BaseModel):
    """Its other fields depend on its kind."""

    model_config = ConfigDict(extra="allow")
    kind: str
    at: float
    seq: int | None = None
    """Of a stored event; turns are told only as they come."""


class Events(Schema):
    events: list[Event] | None = None
    completed: bool | None = None
    """Of a long-poll (`wait=completed`)."""


class Added(Schema):
    added: bool


class EngineView(Schema):
    name: str
    url: str
    healthy: bool
    in_flight: int
    version: int
    model: str | None
    max_context_tokens: int | None
    text_only: bool
    details: dict[str, Any]


class Engines(Schema):
    engines: list[EngineView]
    paused: bool


class EngineAdded(Schema):
    name: str


class Paused(Schema):
    paused: bool


class Status(Schema):
    status: str


class Nothing(Schema):
    pass


class Failure(Schema):
    message: str


class Error(Schema):
    error: Failure


def parsed(model: type[M], body: bytes) -> M:
    """Raises RequestError that names the field, its value and what is wanted."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        shown = repr(first["input"])[:_SHOWN_CHARS]
        raise RequestError(f"{field}: {first['msg']}, not {shown}", param=field) from error
