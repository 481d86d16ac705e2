"""Where metrics are written: JSONL, TensorBoard, and Weights & Biases or MLflow if configured.

Invariant: the metrics of a step are one JSONL line, which is complete and flushed when `log`
returns; the other sinks receive the same numbers. The services also get the report of a run that
has ended, and the transcripts of its trials to read. A service that fails at the end is a warning.
"""

from __future__ import annotations

import importlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from proxy.run_files.lines import line_of, metrics_fields
from trainer.errors import ConfigError
from trainer.run.warned_errors import errors_as_warnings


@dataclass(frozen=True, slots=True)
class Transcript:
    """A trial to read. Example: Transcript("sum-17-x", "sum-17 · reward 1.000 · 3 turns", "…")"""

    trial_id: str
    facts: str
    """One line about the trial."""
    text: str
    """Its messages, what was sampled, and what its verifier wrote."""


class Sink(Protocol):
    """One place where metrics are written."""

    service: str
    """Its name, for messages."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """The report of the run, which has ended, and the transcripts of the trials in it."""
        ...

    def close(self) -> None: ...


class MetricsLog:
    """Example: log.log(12, {"reward/mean": 0.62, "time/step_s": 3.1})"""

    def __init__(self, sinks: list[Sink], say: Callable[[str], None]) -> None:
        """`say` shows a line, such as a warning."""
        self._sinks = sinks
        self._say = say

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """A sink that does not take the report is a warning; the others still get it."""
        for sink in self._sinks:
            what = f"{page.name} could not be sent to {sink.service}"
            with errors_as_warnings(what, self._say):
                sink.report(page, transcripts)

    def close(self) -> None:
        """A sink that does not close is a warning; the others are still closed."""
        for sink in self._sinks:
            with errors_as_warnings(f"{sink.service} could not be closed", self._say):
                sink.close()


class JsonlSink:
    """One line per step in `metrics.jsonl`."""

    service = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._file.write(line_of(metrics_fields(step, values, time.time())))

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """Does nothing: the report is in the same folder."""

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes for TensorBoard. Points of an interrupted run from `purge_step` on are hidden."""

    service = "TensorBoard"

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Callable[..., Any] = SummaryWriter
        self._writer = make(str(folder), purge_step=purge_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """Does nothing: the report is in the run's folder, too."""

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases, which keeps the first values that it receives for a step. `run_id`
    is the id of the run to continue; None: a new run."""

    service = "Weights & Biases"

    def __init__(
        self, project: str, name: str, config: Mapping[str, Any], run_id: str | None = None
    ) -> None:
        self._wandb = _import("wandb", "logging.wandb_project")
        self.run_id = run_id or f"{name}-{secrets.token_hex(4)}"
        self._run = self._wandb.init(
            project=project, name=name, id=self.run_id, config=config, resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """Media of the run: `report`, and the table `transcripts`."""
        rows = [[each.trial_id, each.facts, each.text] for each in transcripts]
        table = self._wandb.Table(columns=["trial", "facts", "transcript"], data=rows)
        self._run.log({"report": self._wandb.Html(str(page), inject=False), "transcripts": table})

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """Logs to MLflow. `run_id` is the id of the run to continue; None: a new run."""

    service = "MLflow"

    def __init__(
        self, experiment: str, name: str, config: Mapping[str, Any], run_id: str | None = None
    ) -> None:
        self._mlflow = _import("mlflow", "logging.mlflow_experiment")
        try:
            if run_id is None:
                self._mlflow.set_experiment(experiment)
                run_id = str(self._mlflow.start_run(run_name=name).info.run_id)
            else:
                self._mlflow.start_run(run_id=run_id)
            self._mlflow.log_dict(dict(config), "config.json")
        except self._mlflow.MlflowException as error:
            raise ConfigError(
                f"logging.mlflow_experiment={experiment}: MLflow refuses the run ({error}); check "
                "its server and MLFLOW_TRACKING_URI, or remove the key"
            ) from error
        self.run_id = run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def report(self, page: Path, transcripts: Sequence[Transcript]) -> None:
        """Artifacts of the run: `report.html`, and `transcripts/TRIAL.txt`."""
        self._mlflow.log_artifact(str(page))
        for each in transcripts:
            text = f"{each.facts}\n\n{each.text}\n"
            name = re.sub("[^A-Za-z0-9._-]+", "_", each.trial_id)
            self._mlflow.log_text(text, f"transcripts/{name}.txt")

    def close(self) -> None:
        self._mlflow.end_run()


def _import(package: str, key: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{key} is set but {package} is not installed: pip install {package}, or remove the key"
        ) from error
