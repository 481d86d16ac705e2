"""A training run as its folder shows it; the files are described in docs/view.md.

Invariant: only reads, and only what a request asks for. A file that is missing is empty; the folder
may be that of a run that is still going on, or of another trainer that writes the same files.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import yaml

from proxy.errors import ConfigurationError
from proxy.file_lock import is_locked
from proxy.shown_config import MAX_CHARS, flat_config
from proxy.store import open_store
from proxy.store.browser import Browser
from proxy.view.json_lines import Line, lines_after, lines_before, lines_of_step
from proxy.view.run_answers import (
    EvaluationJson,
    MetricsPage,
    NowJson,
    RunJson,
    RunStamps,
    StepTrials,
    TrialJson,
)
from proxy.view.run_tokens import RunTokens, TrialTokens
from proxy.view.trial_filter import TrialFilter

MAX_SOURCES = 50
STEP_TRIALS = 5_000
"""Trials of one step in one answer."""
_TRIAL_FIELDS = [name for name in TrialJson.__annotations__ if name != "marks"]


class RecordedRun:
    """Example: RecordedRun(Path("runs/quickstart")).step(12)"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self.tokens = RunTokens(path / "tokens")

    @property
    def sessions(self) -> Path:
        """The store of its sessions."""
        return self.path / "sessions.db"

    @property
    def model(self) -> Path | None:
        """The folder of the model that it trains."""
        section = _yaml(self.path / "config.yaml").get("model")
        path = section.get("path") if isinstance(section, dict) else None
        return Path(path) if isinstance(path, str) and Path(path).is_dir() else None

    def stamps(self) -> RunStamps:
        """What changes when a file does: a reader of the page then asks for what is new."""
        return {
            "name": self.name,
            "metrics": _stamp(self.path / "metrics.jsonl"),
            "trials": _stamp(self.path / "trials.jsonl"),
            "summary": _stamp(self.path / "summary.json"),
            "now": self._now(),
        }

    def _now(self) -> NowJson | None:
        found = _json(self.path / "now.json")
        if any(name not in found for name in NowJson.__annotations__):
            return None
        return cast("NowJson", {name: found[name] for name in NowJson.__annotations__})

    def summary(self) -> RunJson:
        """The run at a glance: its status, its evaluations, and its configuration."""
        summary = _json(self.path / "summary.json")
        if summary.get("status") == "running" and not is_locked(self.path / "run.lock"):
            summary["status"] = "killed"
        if not isinstance(summary.get("status"), str):
            summary["status"] = None
        found = summary.get("eval")
        return {
            "name": self.name,
            "status": summary["status"],
            "steps": summary.get("steps"),
            "policy_version": summary.get("policy_version"),
            "wall_s": summary.get("wall_s"),
            "tokens_sampled": summary.get("tokens_sampled"),
            "tokens_trained": summary.get("tokens_trained"),
            "machine": summary.get("machine"),
            "error": summary.get("error"),
            "warnings": summary.get("warnings"),
            "evaluations": [
                _evaluation(name, result)
                for name, result in (found if isinstance(found, dict) else {}).items()
                if isinstance(result, dict)
            ],
            "config": dict(flat_config(_yaml(self.path / "config.yaml"))),
        }

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

    def step(self, step: int) -> StepTrials:
        """The trials of a step: those that it trained, and those of evaluations after it."""
        found = lines_of_step(self.path / "trials.jsonl", step, STEP_TRIALS)
        return {"step": step, "trials": [trial_fields(line) for line in found]}


@asynccontextmanager
async def reading(sessions: Path) -> AsyncIterator[Browser]:
    """Reads the store in a file."""
    store = await open_store(f"sqlite:///{sessions.absolute()}", create=False)
    try:
        yield store.browser
    finally:
        await store.close()


class RecordedRuns(Mapping[str, RecordedRun]):
    """The runs that the page shows, by name; the first one's sessions are in the store."""

    def __init__(self, paths: Sequence[Path] = ()) -> None:
        """Raises ConfigurationError for two folders of one name."""
        self._runs: dict[str, RecordedRun] = {}
        for path in paths:
            run = RecordedRun(path)
            if run.name in self._runs:
                raise ConfigurationError(
                    f"{path} and {self._runs[run.name].path} have the same name {run.name!r};"
                    " rename one of the folders, or show one of them"
                )
            self._runs[run.name] = run

    def __getitem__(self, name: str) -> RecordedRun:
        return self._runs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def trained_tokens(self, session_id: str) -> TrialTokens | None:
        """What the trainer of the first run knows of a session's tokens, if it trained any."""
        first = next(iter(self.values()), None)
        return None if first is None else first.tokens.of(session_id)

    @asynccontextmanager
    async def browser_of(self, run: RecordedRun, first: Browser) -> AsyncIterator[Browser | None]:
        """Reads the sessions of a run; None if it has none of its own. `first` reads those of the
        first run."""
        if run is next(iter(self.values())):
            yield first
        elif run.sessions.is_file():
            async with reading(run.sessions) as browser:
                yield browser
        else:
            yield None

    def state(self) -> list[RunStamps]:
        return [run.stamps() for run in self.values()]


def _evaluation(name: str, result: dict[str, Any]) -> EvaluationJson:
    sources = result.get("per_source")
    found = [
        {
            **_small(score),
            "name": source[:MAX_CHARS],
            "reward": score.get("mean_reward"),
            "trials": score.get("rollouts"),
        }
        for source, score in (sources if isinstance(sources, dict) else {}).items()
        if isinstance(score, dict)
    ]
    several = {"sources": found[:MAX_SOURCES]} if len(found) > 1 else {}
    return cast("EvaluationJson", {"name": name, **_small(result), **several})


def _small(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if _is_small(value)}


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, list) and len(value) <= 2)


def trial_fields(line: Line) -> TrialJson:
    """What the page shows of a line of trials.jsonl."""
    found = {
        name: value[:MAX_CHARS] if isinstance(value := line.get(name), str) else value
        for name in _TRIAL_FIELDS
    }
    return cast("TrialJson", found)


def _stamp(path: Path) -> list[int]:
    """Changes when the file is replaced (first number) or grows."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return [0, 0]
    return [found.st_ino, found.st_size]


def _json(path: Path) -> dict[str, Any]:
    return _object(path, json.loads)


def _yaml(path: Path) -> dict[str, Any]:
    return _object(path, yaml.safe_load)


def _object(path: Path, load: Callable[[str], Any]) -> dict[str, Any]:
    """The file's object; `{}` if there is no such file, or none in it."""
    if not path.is_file():
        return {}
    try:
        found = load(path.read_text())
    except (ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
