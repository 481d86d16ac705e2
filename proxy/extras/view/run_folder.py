"""A training run as its folder shows it; the files are described in docs/publishing.md.

Invariant: only reads, and only what a request asks for. A file that is missing is empty; the folder
may be that of a run that is still going on, or of another trainer that writes the same files.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, cast

import yaml

from proxy.extras.view.run_answers import (
    EndOfRun,
    EvaluationJson,
    MetricsPage,
    NowJson,
    RunJson,
    RunStamps,
    SourceScore,
    StepTrials,
    TrialJson,
)
from proxy.extras.view.run_tokens import RunTokens
from proxy.extras.view.trial_filter import TrialFilter
from proxy.extras.view.typed_fields import as_type, fitting
from proxy.http.valid_json import read_json, valid_json
from proxy.machine.file_lock import is_locked
from proxy.machine.secrecy import MAX_CHARS, flat_config
from proxy.run_files.evidence import RunRecord
from proxy.run_files.json_lines import (
    Line,
    last_line_with,
    lines_after,
    lines_before,
    lines_of_step,
)
from proxy.run_files.trial_files import TrialFiles
from proxy.run_files.verdict import RunVerdict, VerdictJson
from proxy.store import open_store
from proxy.store.browser import Browser

FILE_BYTES = 8 * 2**20
"""Of a summary or a configuration; a larger file counts as empty."""
REPORT, REPORT_BYTES = "report.html", 64 * 2**20
NOW_BYTES = 64 * 2**10
"""`agentic-train` writes less than 4 KiB."""
NOW_ERRORS = 20
MAX_SOURCES = 50
LAST_LINES = 50
"""Lines of metrics in the last event: more than a run writes between two requests."""
STEP_TRIALS = 5_000
"""Trials of one step in one answer."""
_TRIAL_FIELDS = [
    name
    for name in TrialJson.__annotations__
    if name not in ("marks", "advantage", "trained_tokens")
]


class RecordedRun:
    """Example: RecordedRun(Path("runs/quickstart")).step(12)"""

    def __init__(self, path: Path, *, published: bool = False) -> None:
        """`published`: by another trainer, whose process is not known here."""
        self.path = path
        self.published = published
        self.name = path.resolve().name
        self.tokens = RunTokens(path / "tokens")
        self._record: RunRecord | None = None
        self._judging = Lock()

    @property
    def sessions(self) -> Path:
        """The store of its sessions."""
        return self.path / "sessions.db"

    @property
    def base_model(self) -> str | None:
        """The model with which the run began, as its configuration names it."""
        section = _yaml(self.path / "config.yaml").get("model")
        path = section.get("path") if isinstance(section, dict) else None
        return path if isinstance(path, str) else None

    @property
    def model(self) -> Path | None:
        """A folder with the tokenizer of the model that it trains: that of its own last checkpoint,
        which travels with the run, or else the model that it began with."""
        checkpoints = sorted(self.path.glob("checkpoints/step-*/model"), reverse=True)
        own = next((each for each in checkpoints if (each / "tokenizer.json").is_file()), None)
        if own is not None:
            return own
        path = self.base_model
        return Path(path) if path is not None and Path(path).is_dir() else None

    def stamps(self) -> RunStamps:
        """What changes when a file does: a reader of the page then asks for what is new."""
        return {
            "name": self.name,
            "folder": self.folder,
            "running": self._runs(),
            "metrics": _stamp(self.path / "metrics.jsonl"),
            "trials": _stamp(self.path / "trials.jsonl"),
            "summary": _stamp(self.path / "summary.json"),
            "now": self._now(),
        }

    @property
    def folder(self) -> str:
        """By which it is opened from any working folder."""
        return str(self.path.absolute())

    def report(self) -> bytes | None:
        """`report.html`; None if it is not written, or not a file of the folder's own."""
        with suppress(OSError):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(self.path / REPORT, flags), "rb") as file:
                found = os.fstat(file.fileno())
                if stat.S_ISREG(found.st_mode) and found.st_size <= REPORT_BYTES:
                    return file.read()
        return None

    def _runs(self) -> bool:
        """Asked once per second and reader: the lock is tried before the summary is read."""
        if not (self.published or is_locked(self.path / "run.lock")):
            return False
        return _object(self.path / "summary.json", read_json).get("status") == "running"

    def _now(self) -> NowJson | None:
        """Read once per second and reader: a file of another form or size is left out."""
        found = _object(self.path / "now.json", read_json, NOW_BYTES)
        known = {name: found[name] for name in NowJson.__annotations__ if name in found}
        now = as_type(NowJson, known)
        if now is not None:
            now["phase"] = now["phase"][:MAX_CHARS]
            now["errors"] = [
                {"trial_id": each["trial_id"][:MAX_CHARS], "error": each["error"][:MAX_CHARS]}
                for each in now["errors"][-NOW_ERRORS:]
            ]
        return now

    def summary(self) -> RunJson:
        """The run at a glance: its status, its evaluations, and its configuration."""
        written = _object(self.path / "summary.json", read_json)
        summary = fitting(RunJson, written)
        lives = self.published or is_locked(self.path / "run.lock")
        if summary.get("status") == "running" and not lives:
            summary["status"] = "killed"
        found = written.get("eval")
        config = dict(flat_config(_yaml(self.path / "config.yaml")))
        return {
            "name": self.name,
            "folder": self.folder,
            "status": summary.get("status"),
            "verdict": self._verdict(summary, config),
            "steps": summary.get("steps"),
            "policy_version": summary.get("policy_version"),
            "wall_s": summary.get("wall_s"),
            "tokens_sampled": summary.get("tokens_sampled") or self._sampled(),
            "tokens_trained": summary.get("tokens_trained"),
            "machine": summary.get("machine"),
            "gpus": summary.get("gpus"),
            "report": (self.path / REPORT).is_file(),
            "error": summary.get("error"),
            "warnings": summary.get("warnings"),
            "evaluations": [
                _evaluation(name, result)
                for name, result in (found if isinstance(found, dict) else {}).items()
                if isinstance(result, dict)
            ],
            "config": config,
        }

    def _verdict(self, summary: Mapping[str, Any], config: Mapping[str, str]) -> VerdictJson | None:
        """How the run is doing, from the lines that were added since it was asked last."""
        with self._judging:
            if self._record is None:
                self._record = RunRecord(self.path, _number(config.get("eval.success_at"), 1.0))
            evidence = self._record.read()
            if summary.get("status") is None and not evidence.measures:
                return None
            now = self._now() if summary.get("status") == "running" else None
            folder = self.path.absolute()
            return RunVerdict(folder, evidence, summary, config, now=dict(now or {})).json()

    def _sampled(self) -> int | None:
        """Number of sampled tokens of all trials, evaluations included."""
        return None if self._record is None else self._record.sampled_tokens or None

    def end(self) -> EndOfRun:
        """The run for a reader who cannot ask any more."""
        path = self.path / "metrics.jsonl"
        found, _ = lines_before(path, None, lambda _: True, LAST_LINES)
        return {"run": self.summary(), "lines": found[::-1]}

    def last_metrics(self) -> Iterator[tuple[str, float]]:
        """What the last lines of its metrics say last, and the number of sampled tokens."""
        found, _ = lines_before(self.path / "metrics.jsonl", None, lambda _: True, LAST_LINES)
        last: dict[str, Any] = {}
        for _, line in found[::-1]:  # an evaluation's line has its metrics only
            last |= line
        for name, value in last.items():
            if isinstance(value, int | float) and math.isfinite(value):
                yield name, float(value)
        if (sampled := self._sampled()) is not None:
            yield "tokens_sampled", float(sampled)

    def metrics(self, start: int) -> MetricsPage:
        """The metrics after a byte of the file, and the byte to go on from."""
        lines, end = lines_after(self.path / "metrics.jsonl", start)
        return {"steps": lines, "next": end, "file": _stamp(self.path / "metrics.jsonl")[0]}

    def trials(
        self, where: TrialFilter, before: int | None, limit: int
    ) -> tuple[list[tuple[int, TrialJson]], int | None]:
        """The latest trials that match, each with the byte at which its line begins, and the byte
        of the file to go on from."""
        found, end = lines_before(self.path / "trials.jsonl", before, where.matches, limit)
        return [(at, trial_fields(line)) for at, line in found], end

    def step(self, step: int, kind: str = "", group: str = "") -> StepTrials:
        """The trials of a step: those that it trained, and those of evaluations after it; of one
        `kind` or `group`, if that is given."""

        def matches(line: dict[str, Any]) -> bool:
            own = str(line.get("group") or line.get("task_id"))[:MAX_CHARS]
            return (not kind or line.get("kind") == kind) and (not group or own == group)

        found, more = lines_of_step(self.path / "trials.jsonl", step, STEP_TRIALS, matches)
        trials = [trial_fields(line) for line in found]
        for trial in trials:
            if trial["kind"] == "train":
                tokens = self.tokens.of(trial["trial_id"] or "")
                trial["advantage"] = None if tokens is None else tokens.advantage
                trial["trained_tokens"] = None if tokens is None else tokens.trained
        return {"step": step, "trials": trials, "left_out": more}

    def trial(self, trial_id: str) -> TrialJson | None:
        """None if it has not ended."""
        line = last_line_with(self.path / "trials.jsonl", "trial_id", trial_id)
        return None if line is None else trial_fields(line)

    def files(self, trial_id: str) -> TrialFiles:
        return TrialFiles(self.path / "trials", trial_id)


@asynccontextmanager
async def reading(sessions: Path) -> AsyncIterator[Browser]:
    """Opens the store in a file."""
    store = await open_store(f"sqlite:///{sessions.absolute()}", create=False)
    try:
        yield store.browser
    finally:
        await store.close()


def _evaluation(name: str, result: dict[str, Any]) -> EvaluationJson:
    sources = result.get("per_source")
    found = [
        _small(
            score
            | {
                "name": source[:MAX_CHARS],
                "reward": score.get("mean_reward"),
                "trials": score.get("rollouts"),
            },
            SourceScore,
        )
        for source, score in (sources if isinstance(sources, dict) else {}).items()
        if isinstance(score, dict)
    ]
    several = {"sources": found[:MAX_SOURCES]} if len(found) > 1 else {}
    whole = result | several | {"name": name}
    return cast("EvaluationJson", _small(whole, EvaluationJson))


def _small(values: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The numbers and the intervals of an evaluation, those of `kind` with its types."""
    numbers = {key: value for key, value in values.items() if _is_small(value)}
    more = {key: value for key, value in numbers.items() if key not in kind.__annotations__}
    return more | fitting(kind, values)


def _is_small(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 2 and all(isinstance(each, int | float) for each in value)
    return isinstance(value, int | float)


def trial_fields(line: Line) -> TrialJson:
    """What the page shows of a line of trials.jsonl."""
    found = fitting(TrialJson, {name: line.get(name) for name in _TRIAL_FIELDS})
    shown = {
        name: value[:MAX_CHARS] if isinstance(value := found.get(name), str) else value
        for name in _TRIAL_FIELDS
    }
    return cast("TrialJson", shown)


def _stamp(path: Path) -> list[int]:
    """Changes when the file is replaced (first number), grows, or is written: a file that is
    replaced twice can have its first inode again. Microseconds are exact in JavaScript."""
    try:
        found = path.stat()
    except OSError:
        return [0, 0, 0]
    return [found.st_ino, found.st_size, found.st_mtime_ns // 1000]


def _number(text: str | None, otherwise: float) -> float:
    try:
        return float(text) if text is not None else otherwise
    except ValueError:
        return otherwise


def _yaml(path: Path) -> dict[str, Any]:
    return _object(path, _read_yaml)


def _read_yaml(raw: bytes) -> Any:
    try:
        return valid_json(yaml.safe_load(raw.decode(errors="replace")))
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _object(path: Path, read: Callable[[bytes], Any], most: int = FILE_BYTES) -> dict[str, Any]:
    """The file's object; `{}` if it cannot be read, has more than `most` bytes, or has none."""
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError:
        return {}
    found = read(raw) if len(raw) <= most else None
    return found if isinstance(found, dict) else {}
