"""`agentic-train learn`: makes a person's model better at that person's own work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from proxy.client import ProxyClientError
from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import make_folder
from proxy.keys import kept_key
from proxy.records import FOLDER
from proxy.rendering.tokenizer import load_tokenizer
from trainer.cluster.device_plan import fitted, gpus_here
from trainer.cluster.local import local_trainer
from trainer.cluster.ranks import device_of
from trainer.commands.runs import reporting
from trainer.errors import ConfigError
from trainer.extras.learn.config import LearnConfig, read_config
from trainer.extras.learn.learner import DailyLearner, restrict_modes
from trainer.extras.learn.rebuild import check_forgetting, forget, proven
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
    if arguments.prove:
        async with learning(config) as learner:
            print("\n".join(await proven(learner)) or "no adapter is stable but the base")
        return 0
    if arguments.forget or arguments.day or arguments.repository:
        return await _forget(config, arguments)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with learning(config) as learner:
        if arguments.once:
            await learner.tick()
        else:
            await learner.run(stop)
    return 0


async def _forget(config: LearnConfig, arguments: argparse.Namespace) -> int:
    """Removes sessions from the recorder's store and from what was learned."""
    async with (
        learning(config) as learner,
        LearnClient(config.url) as admin,
    ):
        names = await chosen(learner, admin, arguments)
        check_forgetting(learner, names)
        for name in sorted(names):
            with contextlib.suppress(NotThere):
                await _deleted(admin, name)
        done = await forget(learner, names)
        await learner.tick()
    print(f"{len(names)} sessions are forgotten")
    for before, after in done.rebuilt.items():
        print(f"adapter {before} had learned from them; adapter {after} is in its place")
    for number, why in done.refused.items():
        print(f"adapter {number}, computed without them, is refused by a gate: {'; '.join(why)}")
    if done.dropped:
        print(f"adapters {', '.join(map(str, done.dropped))} are deleted")
    return 0


class NotThere(Exception):
    """The record of a session is gone already."""


async def _deleted(admin: LearnClient, name: str) -> None:
    try:
        await admin.delete(name)
    except ProxyClientError as error:
        if error.status == 404:
            raise NotThere from error
        raise


async def chosen(
    learner: DailyLearner, admin: LearnClient, arguments: argparse.Namespace
) -> set[str]:
    """The ids that the arguments name: of the recorder's sessions, and of those that were learned
    and are no longer there.

    Raises:
        ConfigError: there is none.
    """
    names = set(arguments.forget)
    known = {each: line["created_at"] for each, line in learner.history.sessions.items()}
    async for view in _all(admin):
        folder = Path(str(view["metadata"].get(FOLDER, "")))
        if arguments.repository and folder.is_relative_to(arguments.repository.resolve()):
            names.add(view["trial_id"])
        known.setdefault(view["trial_id"], view["created_at"])
    if arguments.day:
        names |= {each for each, at in known.items() if _day(at) == arguments.day}
    unknown = names - known.keys()
    if unknown or not names:
        raise ConfigError(
            f"no session {', '.join(sorted(unknown))}: see `agentic-proxy sessions list`"
            if unknown
            else "no session is of that day or repository"
        )
    return names


async def _all(admin: LearnClient) -> AsyncIterator[dict[str, Any]]:
    page: list[dict[str, Any]] = await admin.list_sessions(limit=1000)
    while page:
        for view in page:
            yield view
        page = await admin.list_sessions(limit=1000, after=page[-1]["trial_id"])


def _day(at: float) -> str:
    """The local day. Example: `2026-11-28`"""
    return datetime.fromtimestamp(at).astimezone().date().isoformat()


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
            decode = load_tokenizer(config.model.path).decode
            learner = DailyLearner(config, recorder, rank_zero, probe, decode)
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
