"""`agentic-train replay RUN`: computes the steps of a deterministic run again, from its record.

No agent runs and nothing is sampled: each step gets the groups that it had. Invariant: a step that
is reported as equal has the same tokens, advantages, gradients and weights, bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from agent_loop.records import Group
from trainer.checkpoint import Checkpoints, Saved
from trainer.cluster.device_plan import fitted, gpus_here
from trainer.cluster.local import local_trainer
from trainer.cluster.rank_zero import RankZero, Restore
from trainer.commands.runs import reporting
from trainer.extras.ledger.ledger import (
    LedgerError,
    Line,
    line_of_step,
)
from trainer.extras.ledger.record import Record
from trainer.extras.ledger.resample import SamplingEngine, sampling_engine
from trainer.fit import StepResult, TrainOn
from trainer.learning.policies import Learners
from trainer.run.control import RunControl
from trainer.run.folder import RunFolder
from trainer.run.token_log import TokenColumns


class MismatchError(LedgerError):
    """A step has other results than the ledger says."""


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train replay`; returns its exit code."""
    return reporting("agentic-train replay", lambda: asyncio.run(_replay(arguments)))


async def _replay(arguments: argparse.Namespace) -> int:
    record = Record.open(arguments.run, arguments.words)
    start = record.checkpoint(arguments.start)
    last = arguments.last or record.last
    record.check_configuration(start, last, arguments.words)
    if arguments.engines:
        async with sampling_engine(record) as engine:
            return await _computed(record, start, last, engine)
    return await _computed(record, start, last)


async def _computed(
    record: Record, start: int, last: int, engine: SamplingEngine | None = None
) -> int:
    async with replayed(record, start) as trainer:
        check_turns = None
        if engine is not None:
            await engine.connect(trainer.rank_zero)
            check_turns = engine.check
        async for step, groups, done in trainer.steps(last, before=check_turns):
            check(record, step, line_of_step(groups, done.evidence), done.tokens)
            weights = ", ".join(each.weights[:16] for each in done.evidence.policies.values())
            print(f"step {step}: equal, weights {weights}")
    print(f"{record.folder.path}: steps {start + 1} to {last} have the recorded weights")
    return 0


@dataclass(frozen=True, slots=True)
class PassOver:
    """A step that trains nothing, after which the next ones have the numbers and versions that they
    had in the run."""

    def on(self, learners: Learners) -> None:
        for learner in learners.trained.values():
            learner.step += 1
            learner.version += 1
        learners.step_ended()


class Replaying:
    """A trainer that computes recorded steps."""

    def __init__(self, record: Record, rank_zero: RankZero, start: int) -> None:
        self.record = record
        self.rank_zero = rank_zero
        self._step = start

    async def steps(
        self,
        last: int,
        change: Callable[[list[Group]], list[Group]] = lambda groups: groups,
        before: Callable[[int, list[Group]], Awaitable[None]] | None = None,
    ) -> AsyncIterator[tuple[int, Sequence[Group], StepResult]]:
        """Trains on each step up to `last`; yields its number, its groups and what it did. `change`
        may leave rollouts out; a step without groups is passed over, as one of which an earlier
        change left none. `before` is called before each other step."""
        while self._step < last:
            self._step += 1
            if self._step in self.record.forgotten:
                await self.rank_zero.ask(PassOver())
                continue
            if before is not None:
                await before(self._step, self.record.groups(self._step))
            if groups := change(self.record.groups(self._step)):
                train = TrainOn(groups, keep_tokens=True, keep_evidence=True)
                yield self._step, groups, await self.rank_zero.ask(train)
            else:
                await self.rank_zero.ask(PassOver())


@asynccontextmanager
async def replayed(record: Record, start: int) -> AsyncIterator[Replaying]:
    """A trainer with the weights that the run had after step `start`."""
    config = fitted(record.config, gpus_here()) if gpus_here() else record.config
    with tempfile.TemporaryDirectory(prefix="agentic-replay-") as name:
        control, scratch = RunControl(), RunFolder(Path(name))
        scratch.logs.mkdir()
        async with local_trainer(config, scratch, control, []) as rank_zero:
            if start:
                saved = _One(record.folder.checkpoints.absolute(), record.saved[start])
                await rank_zero.ask(Restore(saved))
            yield Replaying(record, rank_zero, start)


class _One(Checkpoints):
    """One checkpoint of several."""

    def __init__(self, folder: Path, saved: Saved) -> None:
        super().__init__(folder, keep_last=1)
        self._saved = saved

    def latest(self) -> Saved:
        return self._saved


def check(record: Record, step: int, found: Line, tokens: TokenColumns | None) -> None:
    """Compares a step with its line in the ledger.

    Raises:
        MismatchError: they differ; it names the first trial, turn and token, or the gradient.
    """
    said = record.lines[step]
    if (first := _first_turn(said, found)) is not None:
        trial, turn, how = first
        token = ""
        if turn is not None and tokens is not None and trial in tokens.trials:
            folder = record.folder.tokens / f"step-{step:06d}"
            token = _first_token(folder, tokens, trial, turn)
        where = f"trial {trial}" if turn is None else f"trial {trial}, turn {turn}{token}"
        raise MismatchError(f"step {step}: {where}: differs in {how}")
    if said["policies"] != found["policies"]:
        sums = {said["sums"], found["sums"]}
        why = f" (the run summed {said['sums']}, this process {found['sums']})"
        raise MismatchError(f"step {step}: {_first_sum(said, found)}{why * (len(sums) - 1)}")


def _first_turn(said: Line, found: Line) -> tuple[str, int | None, str] | None:
    """The first trial and turn that differ, and how; None if all are equal."""
    for ours, theirs in zip_longest(_turns(said), _turns(found)):
        if ours == theirs:
            continue
        (trial, recorded), (_, computed) = ours or theirs, theirs or ours
        if not ours or not theirs or recorded.get("turn") != computed.get("turn"):
            return trial, recorded.get("turn"), "is in one of both only"
        names = [name for name in recorded if recorded[name] != computed.get(name)]
        how = [_DIFFER.get(n, f"{n} {recorded[n]} was recorded, {computed.get(n)}") for n in names]
        return trial, recorded.get("turn"), " and ".join(how)
    return None


_DIFFER = {
    "tokens_hash": "its tokens, their log-probabilities or advantages",
    "own_hash": "the trainer's log-probabilities",
}


def _turns(line: Line) -> list[tuple[str, dict[str, Any]]]:
    """Each trial, and each of its turns, in order."""
    found = []
    for group in line["groups"]:
        for trial in group["trials"]:
            rest = {name: value for name, value in trial.items() if name != "turns"}
            found += [(trial["trial"], rest), *((trial["trial"], turn) for turn in trial["turns"])]
    return found


def _first_token(folder: Path, tokens: TokenColumns, trial: str, turn: int) -> str:
    """The first token of the turn whose advantage or log-probability differs from the columns of
    the step in the folder `tokens/` of the run; empty if they are equal, or were removed."""
    if not (folder / "trials.json").is_file():
        return ""
    index = json.loads((folder / "trials.json").read_text(encoding="utf-8"))
    recorded = TokenColumns(
        tuple(index["trials"]),
        index["starts"],
        {name: np.load(folder / f"{name}.npy") for name in tokens.columns},
    )
    ours, theirs = _of_turn(recorded, trial, turn), _of_turn(tokens, trial, turn)
    differ = [
        (int(ours["positions"][at]), name)
        for name in ("positions", "advantages", "logprobs")
        if name in ours
        for at in np.flatnonzero(ours[name] != theirs[name])[:1]
    ]
    if not differ:
        return ""
    position, name = min(differ)
    return f", token at position {position} ({name})"


def _of_turn(tokens: TokenColumns, trial: str, turn: int) -> dict[str, Any]:
    number = tokens.trials.index(trial)
    rows = slice(tokens.starts[number], tokens.starts[number + 1])
    own = tokens.columns["turns"][rows] == turn
    return {name: column[rows][own] for name, column in tokens.columns.items()}


def _first_sum(said: Line, found: Line) -> str:
    for name, recorded in said["policies"].items():
        computed = found["policies"].get(name, {"gradients": [], "weights": None})
        policy = f"policy {name}: " if name else ""
        pairs = zip_longest(recorded["gradients"], computed["gradients"])
        for number, (ours, theirs) in enumerate(pairs, 1):
            if ours != theirs:
                return f"{policy}the gradient of optimizer step {number} differs"
        if recorded["weights"] != computed["weights"]:
            return f"{policy}the weights differ, the gradients are equal"
    return "the policies differ"
