"""A run's life from its configuration to its exit code.

Invariant: however a run ends, its folder's summary says how, its report is written from what is
there, and its processes have ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import main_colocated
from trainer.assembly import Parts, assemble
from trainer.config import TrainerConfig
from trainer.config_sources import dump, load
from trainer.report import write_report
from trainer.run_control import RunControl, StopRequested
from trainer.run_folder import RunFolder, replace_file
from trainer.run_log import RunLog


def check_only(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> str:
    """Checks everything that can be checked without starting a process; the configuration."""
    config = load(path, overrides, environment)
    assemble(config)
    return dump(config)


def train(path: Path, overrides: Sequence[str], environment: Mapping[str, str]) -> int:
    """A new run; its exit code."""
    config = load(path, overrides, environment)
    parts = assemble(config)
    folder = RunFolder.create(config.trainer.run_dir)
    replace_file(folder.config, dump(config))
    return _run(config, parts, folder)


def _run(config: TrainerConfig, parts: Parts, folder: RunFolder) -> int:
    control = RunControl()
    log = RunLog(config, folder)
    log.progress.say(f"{dump(config)}run folder: {folder.path}")
    status = "failed"
    try:
        status = asyncio.run(_under_signals(config, parts, folder, log, control))
    finally:
        log.finish(status)
        report = write_report(folder)
        log.progress.say(f"{status} after {log.wall_s:.0f} s: {folder.summary}, {report}")
        log.close()
        folder.unlock()
    return 0 if control.signal_number is None else 128 + control.signal_number


async def _under_signals(
    config: TrainerConfig, parts: Parts, folder: RunFolder, log: RunLog, control: RunControl
) -> str:
    with control.signals():
        try:
            return await main_colocated.train(config, parts, folder, log, control)
        except StopRequested:
            return "stopped"
