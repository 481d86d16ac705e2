"""The runs of `agentic-train sweep` on a Ray cluster: Ray Tune starts each where there is room, and
its schedulers end early those that fall behind.

A run is a program of its own, as without Ray, in a folder that every node sees; what Ray Tune gets
are its steps' rewards. So a run that was ended goes on from its checkpoint by the same command.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import create_scheduler

from trainer.errors import ConfigError

REWARD = "reward/mean"
POLL_S = 1.0
"""How often the file of a run's steps is read."""
SILENT_S = 10.0
"""A run without a new step says the last one again after this time: only between two results can
Ray Tune end it."""
MOST_STEPS = 10**9
"""Each run has its own `trainer.steps`."""
SAVES_WITHIN_S = 300.0
"""A run that is to end writes its checkpoint within this time."""


def run_all(
    runs: Mapping[Path, Sequence[str]],
    *,
    address: str,
    cpus: float,
    gpus: float,
    scheduler: str,
    grace_steps: int,
    say: Callable[[str], None],
    program: Sequence[str] = (sys.executable, "-m", "trainer.cli"),
) -> int:
    """Runs `agentic-train` with the arguments of each folder's run, until each has ended. Returns
    0, or 130 if Ctrl-C ended them.

    Args:
        runs: A run's folder → its arguments.
        address: `auto`, HOST:PORT of a cluster, or `local` to start one on this machine.
        cpus: Cores that Ray reserves for a run.
        gpus: Cards that Ray reserves for a run, which sees no others.
        scheduler: `asha` or another of Ray Tune's that needs no checkpoint of a trial; `fifo` ends
            no run early.
        grace_steps: Steps before which it ends none.
        say: Gets a line as a run begins, and as it ends.
        program: `agentic-train`.

    Raises:
        ConfigError: no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigError(f"--ray {address}: no Ray cluster answers ({said})") from error
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    _check_room(address, cpus, gpus)
    given = [
        {"folder": str(folder.absolute()), "words": [*program, *words], "cwd": str(Path.cwd())}
        for folder, words in runs.items()
    ]
    chosen = None
    if scheduler != "fifo":
        of = {"time_attr": "step", "metric": REWARD, "mode": "max", "grace_period": grace_steps}
        if scheduler == "asha":
            chosen = create_scheduler("async_hyperband", max_t=MOST_STEPS, **of)
        else:
            chosen = create_scheduler(scheduler, **of)
    progress = Progress(len(runs), say)
    tune.run(
        Run,
        config={"run": tune.grid_search(given)},
        resources_per_trial={"cpu": cpus, "gpu": gpus},
        scheduler=chosen,
        storage_path=str(next(iter(runs)).parent.absolute() / "ray_tune"),
        name="sweep",
        raise_on_failed_trial=False,
        verbose=0,
        callbacks=[progress],
    )
    for folder in runs:  # Ray Tune does not wait for those that save
        with suppress(FileNotFoundError), _log(folder).open("rb") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
    return 0 if progress.ended == len(runs) else 128 + signal.SIGINT


def _check_room(address: str, cpus: float, gpus: float) -> None:
    """Raises ConfigError: no node can ever run one."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus for n in nodes):
        has = ", ".join(f"{n.get('CPU', 0):g} cores and {n.get('GPU', 0):g} cards" for n in nodes)
        raise ConfigError(
            f"--ray {address}: no node has {cpus:g} cores and {gpus:g} cards for a run; they have "
            f"{has}: change --cpus or --gpus"
        )


class Progress(tune.Callback):  # type: ignore[misc]
    """Says what begins and what ends."""

    def __init__(self, runs: int, say: Callable[[str], None]) -> None:
        self._runs = runs
        self._say = say
        self._begun = 0
        self.ended = 0

    def on_trial_start(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self._begun += 1
        self._say(f"[{self._begun}/{self._runs}] {_name(trial)}")

    def on_trial_complete(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self.ended += 1
        last = trial.last_result
        code = last.get("exit_code")
        if code:
            how = f", exit code {code}; see {_log(trial.config['run']['folder'])}"
        else:
            how = ", ended early by the scheduler" if code is None else ""
        self._say(f"{_name(trial)}: {last.get('step', 0)} steps{how}")

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        self.ended += 1
        self._say(f"{_name(trial)}: Ray lost it; see {trial.error_file}")


def _log(folder: str | Path) -> Path:
    return Path(f"{folder}.log")


def _name(trial: Trial) -> str:
    return Path(trial.config["run"]["folder"]).name


class Run(tune.Trainable):  # type: ignore[misc]
    """A run as a trial of Ray Tune."""

    def setup(self, config: dict[str, Any]) -> None:
        run = config["run"]
        self._metrics = Path(run["folder"], "metrics.jsonl")
        self._last: dict[str, Any] = {"step": 0, REWARD: 0.0}
        self._seen = len(self._steps())
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a worker of Ray blocks SIGINT
        try:
            with _log(run["folder"]).open("ab") as log:
                fcntl.flock(log, fcntl.LOCK_EX)  # which the program holds until it ends
                self._process = subprocess.Popen(
                    run["words"], cwd=run["cwd"], stdout=log, stderr=log
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def step(self) -> dict[str, Any]:
        """The run's next step, or with `done` its end."""
        ended = False
        silent = time.monotonic() + SILENT_S
        while True:
            steps = self._steps()
            if len(steps) > self._seen:
                self._last = {key: steps[self._seen][key] for key in ("step", REWARD)}
                self._seen += 1
                return dict(self._last)
            if ended:
                return self._last | {"done": True, "exit_code": self._process.returncode}
            if time.monotonic() > silent:
                return dict(self._last)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_S)
                ended = True

    def _steps(self) -> list[dict[str, Any]]:
        try:
            written = self._metrics.read_bytes()
        except FileNotFoundError:
            return []
        rows = [json.loads(line) for line in written.split(b"\n")[:-1]]
        return [row for row in rows if REWARD in row]

    def cleanup(self) -> None:
        """Ends the run, which saves first; at the end of a sweep Ray Tune gives it ten seconds, and
        then the run goes on from its last checkpoint."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(SAVES_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
