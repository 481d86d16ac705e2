"""What goes over the wire between `AgentRunClient` and `harbor-server`.

The names are those of the rollout server that users of verl's recipe have (`task_path`, `agent`,
`llm_proxy_url`, `rewards`, `rollout_details`, …); fields that it did not have are optional.
Invariant: `rewards` is what the verifier wrote, key by key, or None; never a sum, never a 0 that
nobody gave.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentSpec(_Request):
    """Example: AgentSpec(name="terminus-2", model_name="openai/policy")"""

    name: str | None = None
    """One of Harbor's own agents. Neither this nor `import_path`: the task's oracle."""
    import_path: str | None = None
    """`module:Class`, importable by the server."""
    model_name: str | None = None
    """As Harbor wants it: `provider/model`."""
    override_timeout_sec: float | None = Field(default=None, gt=0)
    override_setup_timeout_sec: float | None = Field(default=None, gt=0)
    max_timeout_sec: float | None = Field(default=None, gt=0)
    llm_proxy_url: str | None = None
    """Older clients put it here; the request's own wins."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class EnvironmentSpec(_Request):
    """Harbor's own name (`docker`, `modal`, …) or `module:Class`; neither: the server's default."""

    type: str | None = None
    import_path: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)

    @property
    def label(self) -> str | None:
        return self.import_path or self.type


class VerifierSpec(_Request):
    override_timeout_sec: float | None = Field(default=None, gt=0)
    max_timeout_sec: float | None = Field(default=None, gt=0)
    disable: bool = False
    import_path: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class AgentRunRequest(_Request):
    """One run. The task is an uploaded archive, `task_path` (known to the server) or `task_name`
    (Harbor's registry, `org/name`, with `task_ref`); an archive wins over `task_path`.
    """

    job_id: str = ""
    """Groups runs in listings."""
    task_id: str = ""
    task_path: str | None = None
    task_name: str | None = None
    task_ref: str | None = None
    agent: AgentSpec = Field(default_factory=AgentSpec)
    timeout_multiplier: float = Field(default=1.0, gt=0)
    max_retries: int = Field(default=0, ge=0, le=0)
    """Only 0: a second attempt in the same recorded session would mix two trials. Retry with a
    session of its own."""
    verifier: VerifierSpec = Field(default_factory=VerifierSpec)
    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    environment_overrides: dict[str, Any] | None = None
    """`override_cpus`, `override_memory_mb`, …: fields of Harbor's EnvironmentConfig."""
    environment_kwargs: dict[str, Any] | None = None
    """Merged over `environment.kwargs`."""
    llm_proxy_url: str | None = None
    """The session's base URL, with `/v1`; given to the agent in the way it wants it."""
    llm_api_key: str | None = None
    """The session's key."""
    artifacts: list[str] = Field(default_factory=list)
    """More paths inside the environment to keep."""
    extra_instructions: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_agent_and_task(self) -> AgentRunRequest:
        if self.agent.name and self.agent.import_path:
            raise ValueError("agent.name and agent.import_path are both set: give one")
        if self.task_name and self.task_path:
            raise ValueError("task_name and task_path are both set: give one")
        return self


class RunStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    """The agent ended by itself (also with an error) and the verifier, if enabled, gave rewards."""
    TIMEOUT = "timeout"
    """The agent was ended at its time-out; `rewards` are there if the verifier could run."""
    FAILED = "failed"
    """Setup, environment or verifier failed: this run says nothing about the agent."""
    CANCELLED = "cancelled"
    LOST = "lost"
    """It was running when the server ended."""

    @property
    def is_final(self) -> bool:
        return self not in (RunStatus.QUEUED, RunStatus.RUNNING)


class RolloutDetail(BaseModel):
    """Harbor's, as terminus-2 with `collect_rollout_details` gives it; one list per turn."""

    model_config = ConfigDict(extra="allow")

    prompt_token_ids: list[list[int]] | None = None
    completion_token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class TokenUsage(BaseModel):
    n_input_tokens: int | None = None
    n_output_tokens: int | None = None
    n_cache_tokens: int | None = None
    cost_usd: float | None = None


class StepRewards(BaseModel):
    """One step of a multi-step task."""

    name: str
    rewards: dict[str, float] | None = None
    error: str | None = None


class AgentRun(BaseModel):
    """A run as the server knows it. Times are Unix seconds.

    Example: AgentRun(run_id="r-5Rk…", status="completed", rewards={"reward": 1.0}, …)
    """

    run_id: str
    status: RunStatus
    phase: str = ""
    """Harbor's last event: `environment-start`, `agent-start`, `verification-start`, …"""
    job_id: str = ""
    task_id: str = ""
    agent: str = ""
    environment: str = ""
    rewards: dict[str, float] | None = None
    steps: list[StepRewards] = Field(default_factory=list)
    rollout_details: list[RolloutDetail] | None = None
    token_usage: TokenUsage | None = None
    metadata: dict[str, Any] | None = None
    """What the agent itself reports."""
    error: str | None = None
    """One line. Beside `completed` or `timeout` it is the agent's; else ours or the sandbox's."""
    error_type: str | None = None
    """The exception's class, such as AgentTimeoutError."""
    result_uri: str | None = None
    retry_count: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    times_s: dict[str, float] = Field(default_factory=dict)
    """Harbor's phases: environment_setup, agent_setup, agent_execution, verifier."""


class RunEvent(BaseModel):
    """`status` or `phase`, with the run as it was then. `number` grows by one in each run."""

    number: int
    kind: str
    at: float
    run: AgentRun


class RunList(BaseModel):
    items: list[AgentRun]
    total: int
    queued: int
    running: int
