"""The requests and answers that `AgentRunClient` and `harbor-server` exchange.

The names are those of the rollout server of verl's recipe (`task_path`, `agent`, `llm_proxy_url`,
`rewards`, `rollout_details`, …). Fields that it did not have are optional. Invariant: `rewards`
contains the verifier's values by key, or is None; it is never a sum or an invented 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AgentSpec(_Request):
    """The agent of a run. Example: AgentSpec(name="terminus-2", model_name="openai/policy")"""

    name: str | None = None
    """One of Harbor's own agents. Without `name` and `import_path`, the task's oracle runs."""
    import_path: str | None = None
    """`module:Class`, importable by the server."""
    model_name: str | None = None
    """In Harbor's form: `provider/model`."""
    override_timeout_sec: float | None = Field(default=None, gt=0)
    override_setup_timeout_sec: float | None = Field(default=None, gt=0)
    max_timeout_sec: float | None = Field(default=None, gt=0)
    llm_proxy_url: str | None = None
    """Older clients set it here. The request's `llm_proxy_url` takes precedence."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class EnvironmentSpec(_Request):
    """The environment of a run: `type` is Harbor's name (`docker`, `modal`, …), `import_path` is
    `module:Class`. Without both, the server's default is used."""

    type: str | None = None
    import_path: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)

    @property
    def label(self) -> str | None:
        return self.import_path or self.type


class VerifierSpec(_Request):
    """How the run is verified. `import_path` replaces the task's own verifier."""

    override_timeout_sec: float | None = Field(default=None, gt=0)
    max_timeout_sec: float | None = Field(default=None, gt=0)
    disable: bool = False
    import_path: str | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)


class AgentRunRequest(_Request):
    """What to run. The task is an uploaded archive, `task_path` (a path on the server) or
    `task_name` (in Harbor's registry, `org/name`, with `task_ref`). An archive takes precedence
    over `task_path`.
    """

    job_id: str = ""
    """Runs can be listed by this id."""
    task_id: str = ""
    task_path: str | None = None
    task_name: str | None = None
    task_ref: str | None = None
    agent: AgentSpec = Field(default_factory=AgentSpec)
    timeout_multiplier: float = Field(default=1.0, gt=0)
    max_retries: int = Field(default=0, ge=0, le=0)
    """Must be 0, because a second attempt in the same session would mix the recordings of two
    trials. Submit another run with a new session instead."""
    verifier: VerifierSpec = Field(default_factory=VerifierSpec)
    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    environment_overrides: dict[str, Any] | None = None
    """Fields of Harbor's EnvironmentConfig: `override_cpus`, `override_memory_mb`, …"""
    environment_kwargs: dict[str, Any] | None = None
    """Take precedence over `environment.kwargs`."""
    llm_proxy_url: str | None = None
    """The session's base URL, with `/v1`. The agent receives it in the way that it reads it."""
    llm_api_key: str | None = None
    """The session's key."""
    artifacts: list[str] = Field(default_factory=list)
    """Additional paths in the environment to keep."""
    extra_instructions: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_agent_and_task(self) -> AgentRunRequest:
        if self.agent.name and self.agent.import_path:
            raise ValueError("agent.name and agent.import_path are both set: give one")
        if self.task_name and self.task_path:
            raise ValueError("task_name and task_path are both set: give one")
        return self


class RunStatus(StrEnum):
    """The state of a run."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    """The agent ended by itself (possibly with an error); the verifier, if enabled, gave
    rewards."""
    TIMEOUT = "timeout"
    """The agent was ended at its time limit. `rewards` are set if the verifier could run."""
    FAILED = "failed"
    """The setup, environment or verifier failed, so the run does not show how good the agent is."""
    CANCELLED = "cancelled"
    LOST = "lost"
    """The run was in progress when the server ended."""

    @property
    def is_final(self) -> bool:
        return self not in (RunStatus.QUEUED, RunStatus.RUNNING)


class RolloutDetail(BaseModel):
    """Tokens that Harbor recorded (terminus-2 with `collect_rollout_details`); one list per
    turn."""

    model_config = ConfigDict(extra="allow")

    prompt_token_ids: list[list[int]] | None = None
    completion_token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class TokenUsage(BaseModel):
    """Tokens and cost of a run, as the agent reports them."""

    n_input_tokens: int | None = None
    n_output_tokens: int | None = None
    n_cache_tokens: int | None = None
    cost_usd: float | None = None


class StepRewards(BaseModel):
    """The result of one step of a multi-step task."""

    name: str
    rewards: dict[str, float] | None = None
    error: str | None = None


AGENT_CRASHES = frozenset(
    {"NonZeroAgentExitCodeError", "OutputTokenExceededError", "ContextWindowExceededError"}
)
"""Harbor's class names of failures that the agent or its model caused, besides a time-out; the
verifier has judged the work. The last two are answers and prompts that reached the policy's limits.
Other subclasses of the first are failures of the service that the agent called."""


class AgentRun(BaseModel):
    """A run and its result. Times are in Unix seconds.

    Example: AgentRun(run_id="r-5Rk…", status="completed", rewards={"reward": 1.0}, …)
    """

    run_id: str
    status: RunStatus
    phase: str = ""
    """The last event of Harbor: `environment-start`, `agent-start`, `verification-start`, …"""
    job_id: str = ""
    task_id: str = ""
    agent: str = ""
    environment: str = ""
    rewards: dict[str, float] | None = None
    steps: list[StepRewards] = Field(default_factory=list)
    rollout_details: list[RolloutDetail] | None = None
    token_usage: TokenUsage | None = None
    metadata: dict[str, Any] | None = None
    """Metadata that the agent reports."""
    error: str | None = None
    """One line. With the status `completed` or `timeout` it is an error of the agent; otherwise of
    the server or the sandbox."""
    error_type: str | None = None
    """The exception's class, such as AgentTimeoutError."""
    result_uri: str | None = None
    retry_count: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    times_s: dict[str, float] = Field(default_factory=dict)
    """Duration of Harbor's phases: environment_setup, agent_setup, agent_execution, verifier."""


class RunEvent(BaseModel):
    """A change of a run. `kind` is `status` or `phase`; `run` is the run after the change. `number`
    counts the events of a run from 1."""

    number: int
    kind: str
    at: float
    run: AgentRun


class RunList(BaseModel):
    """One page of runs, with the number of all runs that match, of queued and of running runs."""

    items: list[AgentRun]
    total: int
    queued: int
    running: int
