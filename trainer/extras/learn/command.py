"""`agentic-train learn`: makes a person's model better at that person's own work."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import make_folder
from proxy.keys import kept_key
from trainer.cluster.device_plan import fitted, gpus_here
from trainer.cluster.local import local_trainer
from trainer.cluster.ranks import device_of
from trainer.commands.runs import reporting
from trainer.extras.learn.config import LearnConfig, read_config
from trainer.extras.learn.learner import DailyLearner, restrict_modes
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.weight_sync.probe import probe_ids

PROBE = "Rename the file, run the tests, and commit the change: git commit -m 'fix: a, b'."
"""A text on which trainer and engines are compared."""


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train learn`; returns its exit code."""
    return reporting("agentic-train learn", lambda: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with learning(config) as learner:
        if arguments.once:
            await learner.tick()
        else:
            await learner.run(stop)
    return 0


@asynccontextmanager
async def learning(config: LearnConfig) -> AsyncIterator[DailyLearner]:
    """A learner that holds the lock of its folder.

    Raises:
        ConfigError: another process has the lock, or the model cannot be loaded.
        LedgerError: the journal was changed.
    """
    restrict_modes()
    folder = open_folder(config.folder)
    processes = config.processes
    device_of(processes.trainer.device)
    processes = fitted(processes, gpus_here())
    probe = probe_ids(config.model.path, PROBE).tolist()
    key = kept_key(config.recorder.key_file)
    try:
        async with (
            LearnClient(config.url, key) as recorder,
            local_trainer(processes, folder, RunControl(), probe) as rank_zero,
        ):
            learner = DailyLearner(config, recorder, rank_zero, probe)
            await learner.begin()
            yield learner
    finally:
        folder.unlock()


def open_folder(path: Path) -> RunFolder:
    """The learner's folder, locked. Raises ConfigError: another process has the lock."""
    make_folder(path)
    folder = RunFolder(path)
    folder.lock()
    folder.logs.mkdir(exist_ok=True)
    return folder
