"""The types of what the page is sent of training runs; `/openapi.json` has their schemas.

The files may be those of another trainer: of a line of `trials.jsonl` and of `summary.json`, a
value of another type than here counts as missing. A line of `metrics.jsonl` is sent as it is.
"""

from __future__ import annotations

from typing import Any, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

from proxy.http.valid_json import CLOSED, OPEN
from proxy.records.binary import MarkFields
from proxy.run_files.trial_files import FilePiece
from proxy.run_files.verdict import VerdictJson


@with_config(CLOSED)
class FailedTrial(TypedDict):
    """A trial that failed in this process of the run."""

    trial_id: str
    error: str


@with_config(CLOSED)
class GroupsNow(TypedDict):
    """How far the next batch is, in groups."""

    ready: int
    needed: int
    running: int
    max_staleness: int
    """Versions by which the groups may be older than the trainer's weights."""


@with_config(CLOSED)
class NowJson(TypedDict):
    """What a run does, as in `now.json`."""

    step: int
    phase: str
    started_at: float
    trials: int
    """Number of trials of the phase; 0 if it is not known."""
    ended: int
    failed: int
    groups: GroupsNow | None
    errors: list[FailedTrial]


@with_config(CLOSED)
class RunStamps(TypedDict):
    """A run, and what changes when one of its files does: the file's inode, size and time."""

    name: str
    folder: str
    running: bool
    """Whether its process lives and has not said that the run has ended."""
    metrics: list[int]
    trials: list[int]
    summary: list[int]
    now: NowJson | None
    """None if the run has ended, or does not write it. It is the last state of a killed run."""


@with_config(OPEN)
class SourceScore(TypedDict):
    """The scores of an evaluation on the tasks of one source; other numbers may follow."""

    name: str
    success: NotRequired[float | None]
    interval: NotRequired[list[float]]
    reward: NotRequired[float | None]
    trials: NotRequired[int]
    failed: NotRequired[int]


@with_config(OPEN)
class EvaluationJson(TypedDict):
    """An evaluation, and the numbers that `summary.json` has of it."""

    name: str
    step: NotRequired[int]
    success: NotRequired[float]
    interval: NotRequired[tuple[float, float]]
    """Of 95 %."""
    reward: NotRequired[float | None]
    reward_interval: NotRequired[tuple[float, float]]
    """Of 95 %."""
    tasks: NotRequired[int]
    trials: NotRequired[int]
    failed: NotRequired[int]
    sources: NotRequired[list[SourceScore]]
    """If the tasks have several."""


@with_config(CLOSED)
class RunJson(TypedDict):
    """Answer of `GET /view/run`: a run at a glance."""

    name: str
    folder: str
    """By which `agentic-proxy view` opens it."""
    status: str | None
    """`killed` if the process ended without saying so."""
    verdict: VerdictJson | None
    """None for an evaluation, in which nothing is trained."""
    steps: int | None
    policy_version: int | None
    wall_s: float | None
    tokens_sampled: int | None
    tokens_trained: int | None
    machine: str | None
    gpus: int | None
    """Number of GPUs of the machine; null if it is not known."""
    report: bool
    """Whether `GET /view/run/report` has one."""
    error: str | None
    warnings: dict[str, int] | None
    evaluations: list[EvaluationJson]
    config: dict[str, str]
    """By key with dots, values as JSON, without secrets."""


@with_config(CLOSED)
class MetricsPage(TypedDict):
    """Answer of `GET /view/run/metrics`: lines of `metrics.jsonl`."""

    steps: list[dict[str, Any]]
    next: int
    """The parameter `from` that goes on."""
    file: int
    """The file's inode: another one is another file."""


@with_config(CLOSED)
class EndOfRun(TypedDict):
    """A run in the last event of a page's stream: what changed after its reader asked last."""

    run: RunJson
    lines: list[tuple[int, dict[str, Any]]]
    """The last lines of `metrics.jsonl`, each with the byte at which it begins."""


@with_config(CLOSED)
class TrialJson(TypedDict):
    """A line of `trials.jsonl`, without its times; null for what it lacks."""

    step: int | None
    kind: str | None
    """`train` or `eval`; `agentic-train eval` writes none."""
    group: str | None
    evaluation: str | None
    trial_id: str | None
    task_id: str | None
    source: str | None
    agent: str | None
    status: str | None
    reward: float | None
    turns: int | None
    sampled_tokens: int | None
    seconds: float | None
    error: str | None
    marks: NotRequired[list[MarkFields]]
    advantage: NotRequired[float | None]
    """Mean over its tokens, in the step that had it; null if no step that is kept had it."""
    trained_tokens: NotRequired[int | None]
    """Number of its tokens that the step trained."""


@with_config(CLOSED)
class TrialsPage(TypedDict):
    """Answer of `GET /view/run/trials`."""

    trials: list[TrialJson]
    next: int | None
    """The parameter `before` that goes on with earlier trials."""


@with_config(CLOSED)
class StepTrials(TypedDict):
    """Answer of `GET /view/run/step`."""

    step: int
    trials: list[TrialJson]
    left_out: bool
    """Whether the step has more."""


@with_config(CLOSED)
class TrialOfRun(TypedDict):
    """Answer of `GET /view/run/trial`: what a run knows of a session; null and none if nothing."""

    run: str | None
    trial: TrialJson | None
    """Null until the trial has ended."""
    files: list[FilePiece]
    """The ends of its log and of what its verifier wrote."""


@with_config(OPEN)
class TraceEvent(TypedDict):
    """An event in the trace event format."""

    ph: str
    pid: int
    name: str


@with_config(OPEN)
class TraceFile(TypedDict):
    """Answer of `GET /view/run/trace`: a file for Perfetto."""

    traceEvents: list[TraceEvent]
