"""A run's life from its configuration to its exit code.

Invariant: however a run ends, its folder's summary says how, its report is written from what is
there, and its processes have ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import main_colocated, main_separate, main_swarm
from trainer.checkpoint import Checkpoints, Saved
from trainer.cluster.follower import follow_rank_0
from trainer.cluster.local import check_seat, torchrun_seat
from trainer.config import TrainerConfig
from trainer.config_sources import dump, load
from trainer.report import write_report
from trainer.run.assembly import Parts, assemble, build_models
from trainer.run.control import RunControl, StopRequested
from trainer.run.folder import RunFolder, replace_file, truncate_jsonl
from trainer.run.log import RunLog
from trainer.run.run import Run


def check_only(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> str:
    """Checks everything that can be checked without starting a process; the configuration."""
    config = load(path, overrides, environment)
    assemble(config)
    build_models(config)
    return dump(config)


def begin(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> int:
    """A new run; its exit code."""
    config = load(path, overrides, environment)
    if _follows(config, environment):
        return 0
    parts = assemble(config)
    folder = RunFolder.create(config.trainer.run_dir)
    replace_file(folder.config, dump(config))
    return _run(config, parts, folder, None)


def resume(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> int:
    """Goes on from the run's last checkpoint, or from its beginning; the exit code.

    What the run had done after that checkpoint is done again, and its lines are dropped.
    """
    folder = RunFolder.open(path)
    config = load(folder.config, overrides, environment)
    if _follows(config, environment):
        return 0
    parts = assemble(config)
    folder.lock()
    replace_file(folder.config, dump(config))
    saved = Checkpoints(folder.checkpoints, keep_last=config.trainer.keep_last).latest()
    for lines in (folder.metrics, folder.trials_log):
        truncate_jsonl(lines, saved.step if saved else 0)
    return _run(config, parts, folder, saved)


def _follows(config: TrainerConfig, environment: Mapping[str, str]) -> bool:
    """Whether torchrun started us as another rank than 0; if so it has ended with rank 0."""
    seat = torchrun_seat(environment)
    if seat is None or seat.rank == 0:
        return False
    check_seat(config, seat)
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun passes them on; rank 0 acts on them
        signal.signal(number, signal.SIG_IGN)
    follow_rank_0(config, seat)
    return True


def _run(config: TrainerConfig, parts: Parts, folder: RunFolder, saved: Saved | None) -> int:
    control = RunControl()
    log = RunLog(config, folder, saved_step=saved.step if saved else 0)
    run = Run(config, parts, folder, log, control)
    log.progress.say(f"{dump(config)}run folder: {folder.path}")
    if saved is not None:
        log.progress.say(f"going on from {saved.path}")
    status = "failed"
    try:
        status = asyncio.run(_under_signals(run))
    finally:
        log.finish(status)
        report = write_report(folder)
        log.progress.say(f"{status} after {log.wall_s:.0f} s: {folder.summary}, {report}")
        log.close()
        folder.unlock()
    return 0 if control.signal_number is None else 128 + control.signal_number


async def _under_signals(run: Run) -> str:
    if run.config.swarm is not None:
        train = main_swarm.train
    elif run.config.trainer.mode == "separate":
        train = main_separate.train
    else:
        train = main_colocated.train
    with run.control.signals():
        try:
            return await train(run)
        except StopRequested:
            return "stopped"
