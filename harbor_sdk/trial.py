"""Runs one real Harbor trial: takes an `AgentRunRequest` and returns Harbor's result as an
`AgentRun`.

Invariant: if the agent runs out of time or crashes, the verifier's reward is kept (`timeout`,
`completed`). Every other failure is `failed`. Needs Python 3.12 and `harbor`. The server uses this
module, and so do local trials (`use_local_trial`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from harbor.models.trial.config import AgentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.config import EnvironmentConfig as HarborEnvironment
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

from harbor_sdk.agents import connect
from harbor_sdk.direct_hosts import with_direct_hosts
from harbor_sdk.models import (
    AGENT_CRASHES,
    AgentRun,
    AgentRunRequest,
    RolloutDetail,
    RunStatus,
    StepRewards,
    TokenUsage,
)

LOCAL_ENVIRONMENT = "harbor_sdk.environment:LocalEnvironment"

_AGENT_TIMEOUT = "AgentTimeoutError"
_PHASES = ("environment_setup", "agent_setup", "agent_execution", "verifier")


async def run_trial(
    request: AgentRunRequest,
    *,
    run_id: str,
    task_dir: Path | None,
    trials_dir: Path,
    hidden: Sequence[Path],
    on_phase: Callable[[str], Awaitable[None]],
) -> AgentRun:
    """Runs the trial in the folder `trials_dir/run_id`.

    `task_dir` is the task's folder, or None for a task of Harbor's registry. A local environment
    does not see the `hidden` folders. If the call is cancelled, it ends the environment first.

    Raises what Harbor raises for an invalid configuration or task.
    """
    environment = _environment(request, hidden)
    trial = await Trial.create(_trial_config(request, run_id, task_dir, trials_dir, environment))

    async def report(event: TrialHookEvent) -> None:
        await on_phase(event.event.value)

    for event in TrialEvent:
        trial.add_hook(event, report)
    return _as_run(await trial.run(), run_id)


def _trial_config(
    request: AgentRunRequest,
    run_id: str,
    task_dir: Path | None,
    trials_dir: Path,
    environment: HarborEnvironment,
) -> TrialConfig:
    agent = request.agent
    if base_url := request.llm_proxy_url or agent.llm_proxy_url:
        agent = connect(agent, base_url, request.llm_api_key)
        # Some of Harbor's agents call the model from this process.
        os.environ.update(with_direct_hosts(os.environ, base_url))
    return TrialConfig(
        task=TaskConfig(path=task_dir)
        if task_dir is not None
        else TaskConfig(name=request.task_name, ref=request.task_ref),
        trial_name=run_id,
        trials_dir=trials_dir,
        timeout_multiplier=request.timeout_multiplier,
        agent=AgentConfig(**agent.model_dump(exclude={"llm_proxy_url"})),
        environment=environment,
        verifier=VerifierConfig(**request.verifier.model_dump()),
        artifacts=list(request.artifacts),
        extra_instructions=list(request.extra_instructions),
    )


def _environment(request: AgentRunRequest, hidden: Sequence[Path]) -> HarborEnvironment:
    given = request.environment.model_dump() | (request.environment_overrides or {})
    given["kwargs"] = {**given["kwargs"], **(request.environment_kwargs or {})}
    if not (given["type"] or given["import_path"]):
        given["import_path"] = LOCAL_ENVIRONMENT
    if given["import_path"] == LOCAL_ENVIRONMENT:
        own = [str(path) for path in hidden]
        given["kwargs"]["hidden_paths"] = [*given["kwargs"].get("hidden_paths", ()), *own]
    return HarborEnvironment(**given)


def _as_run(result: TrialResult, run_id: str) -> AgentRun:
    rewards = result.verifier_result.rewards if result.verifier_result else None
    failure = result.exception_info
    context = result.agent_result
    details = context.rollout_details if context else None
    return AgentRun(
        run_id=run_id,
        status=_status(result),
        rewards=_numbers(rewards),
        steps=[
            StepRewards(
                name=step.step_name,
                rewards=_numbers(step.verifier_result.rewards if step.verifier_result else None),
                error=_one_line(step.exception_info),
            )
            for step in result.step_results or []
        ],
        rollout_details=[RolloutDetail(**detail) for detail in details] if details else None,
        token_usage=TokenUsage(
            **dict(
                zip(
                    ("n_input_tokens", "n_cache_tokens", "n_output_tokens", "cost_usd"),
                    result.compute_token_cost_totals(),
                    strict=True,
                )
            )
        ),
        metadata=context.metadata if context else None,
        error=_one_line(failure),
        error_type=failure.exception_type if failure else None,
        result_uri=result.trial_uri,
        times_s={
            name: _seconds(timing.started_at, timing.finished_at)
            for name in _PHASES
            if (timing := getattr(result, name)) is not None
        },
    )


def _status(result: TrialResult) -> RunStatus:
    failures = [result.exception_info, *(s.exception_info for s in result.step_results or [])]
    kinds = [failure.exception_type for failure in failures if failure is not None]
    verified = result.verifier_result is not None or result.config.verifier.disable
    if not verified or not AGENT_CRASHES.union([_AGENT_TIMEOUT]).issuperset(kinds):
        return RunStatus.FAILED
    return RunStatus.TIMEOUT if _AGENT_TIMEOUT in kinds else RunStatus.COMPLETED


def _numbers(rewards: dict[str, Any] | None) -> dict[str, float] | None:
    return {key: float(value) for key, value in rewards.items()} if rewards is not None else None


def _one_line(failure: Any) -> str | None:
    if failure is None:
        return None
    message = " ".join(failure.exception_message.split())
    return f"{failure.exception_type}: {message}"[:1000]


def _seconds(start: datetime | None, end: datetime | None) -> float:
    return (end - start).total_seconds() if start and end else 0.0
