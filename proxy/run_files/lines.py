"""The lines of `metrics.jsonl`, `trials.jsonl` and `phases.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, with_config
from typing_extensions import TypedDict

from proxy.http.valid_json import CLOSED

MAX_STEP = 2**31 - 1
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Words = Annotated[str, Field(max_length=100_000)]


@with_config(CLOSED)
class TrialTimes(TypedDict):
    """Seconds of the parts of a trial, for the trace."""

    opening: NotRequired[Number]
    """Until the agent starts."""
    agent: NotRequired[Number]
    verifier: NotRequired[Number]
    """Ends with the trial."""


@with_config(CLOSED)
class TrialFields(TypedDict):
    """A finished trial: a line of `trials.jsonl`."""

    step: Step
    kind: Literal["train", "eval"]
    group: NotRequired[Name]
    """The rollouts of one task that are compared with each other, of kind `train`."""
    evaluation: NotRequired[Name]
    """Name of the evaluation, of kind `eval`."""
    trial_id: Name
    """The recorded session."""
    task_id: Name
    source: NotRequired[Annotated[str, Field(max_length=500)]]
    agent: NotRequired[Name]
    status: Literal["done", "truncated", "failed", "aborted"]
    reward: Number | None
    turns: Count
    sampled_tokens: Count
    seconds: Number
    started_at: NotRequired[Number]
    """Unix seconds."""
    times_s: NotRequired[TrialTimes]
    error: NotRequired[Words | None]


@with_config(CLOSED)
class PhaseFields(TypedDict):
    """A phase of the trainer that has ended: a line of `phases.jsonl`."""

    step: Step
    phase: Name
    started_at: Number
    """Unix seconds."""
    seconds: Number


def line_of(values: Mapping[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(values) + "\n"


def metrics_fields(step: int, values: Mapping[str, float | None], at: float) -> dict[str, Any]:
    """The values of a line of `metrics.jsonl`, with null for NaN. `at`: Unix seconds."""
    return {"step": step, "time": at} | {name: _plain(value) for name, value in values.items()}


def _plain(value: float | None) -> float | int | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
