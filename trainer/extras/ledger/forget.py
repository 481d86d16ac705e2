"""`agentic-train forget RUN SESSION`: the weights that a run's record gives without one session.

The steps are computed again, each without the rollouts of that session. What was sampled later
stays as it was sampled, by weights that had learnt from it. Invariant: the weights are those of a
replay of the record from which the session is missing, bit for bit; the ledger of the new folder
says what was left out of which run, and `replay` checks the new folder like any other.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from agent_loop.records import Group
from trainer.checkpoint import Checkpoints
from trainer.cluster.rank_zero import Save
from trainer.commands.runs import reporting
from trainer.errors import ConfigError
from trainer.extras.ledger.ledger import Ledger, LedgerError, Line
from trainer.extras.ledger.record import Record
from trainer.extras.ledger.replay import replayed
from trainer.run.folder import RunFolder

OTHER_WEIGHTS = "engine.verify_tolerance=1e9"
"""Later tokens were sampled by weights that this replay does not have."""


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train forget`; returns its exit code."""
    return reporting("agentic-train forget", lambda: asyncio.run(_forget(arguments)))


async def _forget(arguments: argparse.Namespace) -> int:
    run: Path = arguments.run
    record = Record.open(run, [OTHER_WEIGHTS])
    session: str = arguments.session
    steps = sorted(step for step, line in record.lines.items() if _has(line, session))
    if not steps:
        raise ConfigError(f"{record.folder.ledger}: no step trained the session {session!r}")
    start = max((step for step in record.saved if step < steps[0]), default=0)
    record.check_configuration(start, record.last)
    out: Path = arguments.out or run.with_name(f"{run.resolve().name}-without-{session}")
    folder = RunFolder.create(out)
    shutil.copyfile(record.folder.config, folder.config)
    for step in record.lines:  # so that the new folder replays from its beginning
        if step <= start:
            _copy(record, folder, step)
    about = {"forgets": session, "of": record.head}
    ledger = Ledger(folder, record.config.model.path, about, record.lines_until(start))
    _note_forgotten(ledger, (step for step in sorted(record.forgotten) if step <= start))
    async with replayed(record, start) as trainer:
        done = None
        written = start
        async for step, groups, done in trainer.steps(
            record.last, lambda groups: without(groups, session)
        ):
            _note_forgotten(ledger, range(written + 1, step))
            ledger.write(step, groups, done.evidence)
            written = step
        _note_forgotten(ledger, range(written + 1, record.last + 1))
        checkpoints = Checkpoints(folder.checkpoints.absolute(), keep_last=1)
        await trainer.rank_zero.ask(Save(checkpoints, {}, best=False))
    ledger.close()
    if done is not None:
        weights = {name: each.weights for name, each in done.evidence.policies.items()}
        print(f"steps {', '.join(map(str, steps))} trained {session}; without it, the weights are:")
        for name, value in weights.items():
            print(f"{name} {value}".strip())
    print(f"{folder.path}: {folder.checkpoints.name}, {folder.ledger.name}")
    return 0


def _note_forgotten(ledger: Ledger, steps: Iterable[int]) -> None:
    """Of these steps nothing is left to train."""
    for step in steps:
        ledger.note(step=step, forgotten=True)


def without(groups: Sequence[Group], session: str) -> list[Group]:
    """The groups without the rollouts of the session; empty if nothing is left to train."""
    kept = [
        replace(group, rollouts=tuple(r for r in group.rollouts if r.trial_id != session))
        for group in groups
    ]
    return kept if any(rollout.trainable for group in kept for rollout in group.rollouts) else []


def _has(line: Line, session: str) -> bool:
    return any(trial["trial"] == session for group in line["groups"] for trial in group["trials"])


def _copy(record: Record, folder: RunFolder, step: int) -> None:
    folder.batches.mkdir(exist_ok=True)
    name = f"step-{step:06d}"
    try:
        shutil.copyfile(record.folder.batches / name, folder.batches / name)
    except FileNotFoundError as error:
        raise LedgerError(f"{record.folder.batches / name}: is missing") from error
