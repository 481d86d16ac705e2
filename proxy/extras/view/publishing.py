"""What a trainer sends to publish a run; `/openapi.json` has the schemas.

The same values are in the run's files, which docs/publishing.md describes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from proxy.http.valid_json import CLOSED
from proxy.run_files.lines import Count, Name, Number, PhaseFields, Step, TrialFields, Words

MAX_LINES = 10_000
"""Lines in one request."""
Value = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Fits into 32 bits."""


@with_config(CLOSED)
class PublishedConfig(TypedDict):
    """Body of `PUT /view/runs/{name}`: begins a run, or continues it."""

    config: dict[str, Any]
    """Is shown, and compared with that of other runs; values of secrets are not kept."""
    last_step: NotRequired[Step]
    """The step from which a trainer resumes: what was published of later steps is removed."""


@with_config(CLOSED)
class StepMetrics(TypedDict):
    """The metrics of a step, or of an evaluation after it."""

    step: Step
    time: NotRequired[Number]
    """Unix seconds; default: now."""
    metrics: Annotated[dict[Name, Number | None], Field(max_length=1_000)]
    """By name; docs/publishing.md has those that the page knows, and it shows all others, too."""


@with_config(CLOSED)
class PublishedSteps(TypedDict):
    """Body of `POST /view/runs/{name}/steps`."""

    steps: Annotated[list[StepMetrics], Field(max_length=MAX_LINES)]


@with_config(CLOSED)
class PublishedTrials(TypedDict):
    """Body of `POST /view/runs/{name}/trials`: the groups of steps, and evaluations."""

    trials: Annotated[list[TrialFields], Field(max_length=MAX_LINES)]


@with_config(CLOSED)
class PublishedPhases(TypedDict):
    """Body of `POST /view/runs/{name}/phases`, for the trace."""

    phases: Annotated[list[PhaseFields], Field(max_length=MAX_LINES)]


@with_config(CLOSED)
class FileEnd(TypedDict):
    """Answer: what was sent is on disk."""

    next: int
    """The parameter `at` of the next request for these lines."""


@with_config(CLOSED)
class StepTokens(TypedDict):
    """Body of `PUT /view/runs/{name}/tokens`: the `N` trained tokens of a step, as columns.

    Those of `trials[i]` are the rows `[starts[i], starts[i + 1])`, in the order of turns and
    positions.
    """

    step: Step
    trials: list[Name]
    starts: list[Step]
    turns: list[Step]
    """Index of the token's turn in its session."""
    positions: list[Step]
    """Index of the token on the path of its turn."""
    advantages: NotRequired[list[Value | None]]
    logprobs: NotRequired[list[Value | None]]
    """The trainer's own, before the update."""
    entropies: NotRequired[list[Value | None]]
    """In nats."""
    trained: NotRequired[list[bool]]
    """False where the algorithm left the token out."""


@with_config(CLOSED)
class EvaluationScores(TypedDict):
    """The scores of an evaluation on held-out tasks."""

    step: Step
    success: Number
    interval: NotRequired[tuple[Number, Number]]
    """Of 95 %."""
    reward: NotRequired[Number | None]
    reward_interval: NotRequired[tuple[Number, Number]]
    tasks: NotRequired[Count]
    trials: NotRequired[Count]
    failed: NotRequired[Count]


@with_config(CLOSED)
class PublishedSummary(TypedDict):
    """Body of `PUT /view/runs/{name}/summary`: replaces the summary of the run."""

    status: Literal["running", "done", "stopped", "failed"]
    steps: NotRequired[Count]
    policy_version: NotRequired[Count]
    wall_s: NotRequired[Number]
    tokens_sampled: NotRequired[Count]
    tokens_trained: NotRequired[Count]
    machine: NotRequired[Words]
    error: NotRequired[Words]
    warnings: NotRequired[Annotated[dict[Name, Count], Field(max_length=100)]]
    eval: NotRequired[Annotated[dict[Name, EvaluationScores], Field(max_length=1_000)]]
    """By name of the evaluation."""
