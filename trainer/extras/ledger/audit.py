"""`agentic-train audit RUN`: compares a run's ledger with its batches and its recorded sessions.

Invariant: after an audit without a problem, each trained token of the run is a sampled token of a
recorded turn, with its log-probability and version, trained in one step with one advantage; and
each delivered token was trained or has a reason.

Reasons: `no signal` (its reward is compared with equal ones), `failed`, `aborted`, `no reward`,
`filtered`, `stale`, `masked` (a turn without credit, or of another policy), `cut` (its client
left), `given` (recorded turns that a branch began with), `not finished` (the run ended, or
cancelled it).
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors import safe_open

from agent_loop.records import Rollout
from proxy.records import SessionKind, Turn, TurnStatus
from proxy.run_files.files import read_jsonl
from proxy.store import open_store
from proxy.store.protocol import SessionFilter, Store
from trainer.checkpoint import Checkpoints
from trainer.commands.runs import reporting
from trainer.extras.ledger.evidence import named_hash
from trainer.extras.ledger.ledger import (
    LedgerError,
    Line,
    batch_file,
    read_batch,
    read_lines,
    steps_in,
)
from trainer.run.folder import RunFolder

PAGE = 100
SHOWN = 10
"""Problems that are shown one by one."""


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train audit`; returns its exit code."""
    return reporting("agentic-train audit", lambda: asyncio.run(_audit(arguments.run)))


async def _audit(path: Path) -> int:
    folder = RunFolder.open(path)
    lines = read_lines(folder.ledger)
    audit = Audit(folder, list(steps_in(lines)))
    audit.files(lines)
    store = await open_store(str(folder.sessions), create=False)
    try:
        await audit.sessions(store)
    finally:
        await store.close()
    audit.sums()
    for reason, tokens in sorted(audit.tokens.items(), key=lambda each: -each[1]):
        print(f"{tokens:>10} tokens {reason}")
    print(f"{sum(audit.tokens.values()):>10} tokens delivered in {audit.count} sessions")
    if audit.problems:
        shown = "; ".join(audit.problems[:SHOWN])
        raise LedgerError(f"{len(audit.problems)} problems: {shown}")
    print(f"{folder.ledger}: {len(audit.steps)} steps, head {lines[-1]['hash']}")
    return 0


@dataclass
class Audit:
    """Example: audit = Audit(folder, steps); audit.files(lines); await audit.sessions(store)"""

    folder: RunFolder
    steps: Sequence[Line]
    problems: list[str] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    """Number of delivered tokens by what became of them."""
    count: int = 0
    """Number of sessions."""

    def files(self, lines: Sequence[Line]) -> None:
        """Checks the files that the ledger names, and the checkpoints."""
        if _hash(self.folder.config) != [line["config"] for line in lines if "config" in line][-1]:
            self._problem("config.yaml is not the file that the run began with, or went on with")
        for line in self.steps:
            file = batch_file(self.folder.batches, line["step"])
            if not file.is_file() or _hash(file) != line["batch"]:
                self._problem(f"step {line['step']}: {file.name} is missing or was changed")
        weights = {line["step"]: line["policies"] for line in self.steps}
        for saved in Checkpoints(self.folder.checkpoints, keep_last=1).all():
            path, said = saved.path / "model" / "model.safetensors", weights.get(saved.step, {})
            if list(said) == [""] and _weights(path) not in (None, said[""]["weights"]):
                self._problem(f"{path}: has not the weights of its step")

    async def sessions(self, store: Store) -> None:
        """Counts the tokens of all recorded sessions that train."""
        trained = self._trained()
        left_out = {
            each["trial"]: each["reason"] for line in self.steps for each in line["left_out"]
        }
        where = SessionFilter(kind=SessionKind.TRAIN, limit=PAGE)
        async for session_id in _ids(store, where):
            self.count += 1
            turns = await store.get_turns(session_id)
            found = trained.pop(session_id, None)
            if found is None:
                reason = left_out.get(session_id, "not finished")
                for turn in turns:
                    self.tokens[_of_status(turn) or reason] += len(turn.sampled_ids)
            else:
                self._session(found, turns)
        for trial in trained:
            self._problem(f"trial {trial} was trained, and its session is not recorded")

    def sums(self) -> None:
        """Compares the ledger with the trained tokens that the optimizer steps counted."""
        written = yaml.safe_load(self.folder.config.read_text(encoding="utf-8"))
        epochs = written["algorithm"]["epochs"]
        trained = {line["step"]: line for line in self.steps}
        for metrics in read_jsonl(self.folder.metrics):
            line = trained.get(metrics["step"])
            if line is None or "actor/trained_tokens" not in metrics:
                continue
            counted = round(metrics["actor/trained_tokens"] * metrics["actor/update_steps"])
            if counted != (said := epochs * _trained_tokens(line)):
                step = line["step"]
                self._problem(f"step {step}: {said} tokens to train, and {counted} were counted")

    def _trained(self) -> dict[str, _Trained]:
        """By trial, from the ledger and the batches."""
        trained: dict[str, _Trained] = {}
        for line in self.steps:
            rollouts: dict[str, Rollout] = {}
            try:
                groups = read_batch(batch_file(self.folder.batches, line["step"]))
                rollouts = {each.trial_id: each for group in groups for each in group.rollouts}
            except LedgerError as error:
                self._problem(str(error))
            for group in line["groups"]:
                for said in group["trials"]:
                    trial = said["trial"]
                    if trial in trained:
                        steps = f"{trained[trial].step} and {line['step']}"
                        self._problem(f"trial {trial} was trained in steps {steps}")
                    trained[trial] = _Trained(line["step"], said, rollouts.get(trial))
        return trained

    def _session(self, trained: _Trained, turns: Sequence[Turn]) -> None:
        said = {each["turn"]: each for each in trained.said["turns"]}
        stale = trained.said.get("stale", {})
        for turn in turns:
            sampled, line = len(turn.sampled_ids), said.pop(turn.index, None)
            where = f"step {trained.step}, trial {turn.session_id}, turn {turn.index}"
            if line is None:
                reason = _of_status(turn) or trained.said.get("reason")
                reason = reason or ("stale" if str(turn.index) in stale else "masked")
                self.tokens[reason] += sampled
                continue
            if line["tokens"] > sampled:
                self._problem(f"{where}: {line['tokens']} tokens, of which {sampled} were sampled")
            self.tokens["trained"] += line["trained"]
            self.tokens["no signal"] += line["tokens"] - line["trained"]
            rest = "stale" if str(turn.index) in stale else "masked"
            self.tokens[rest] += sampled - line["tokens"]
            if trained.rollout is not None and (how := _difference(trained.rollout, turn)):
                self._problem(f"{where}, {how}")
        for turn in said:
            self._problem(f"trial {trained.said['trial']}, turn {turn}: is not recorded")

    def _problem(self, text: str) -> None:
        self.problems.append(text)


@dataclass(frozen=True)
class _Trained:
    step: int
    said: Mapping[str, Any]
    """What the ledger says of the trial."""
    rollout: Rollout | None
    """What the batch has of it."""


def _difference(rollout: Rollout, turn: Turn) -> str | None:
    """How the trained tokens of a turn differ from the recorded ones; None if they do not."""
    parts = [
        (segment.ids[own], segment.logprobs[own], segment.versions[own])
        for segment in rollout.segments
        if (own := segment.mask & (segment.turns == turn.index)).any()
    ]
    if not parts:
        return None
    ids, logprobs, versions = (np.concatenate(column) for column in zip(*parts, strict=True))
    spans = [np.full(span.end - span.start, span.version, np.int32) for span in turn.versions]
    sampled = np.concatenate(spans) if spans else np.zeros(0, np.int32)
    columns = {
        "id": (ids, turn.sampled_ids),
        "log-probability": (logprobs, turn.logprobs),
        "version": (versions, sampled),
    }
    if len(ids) != len(turn.sampled_ids):
        return None  # some are too old, which the ledger says
    for name, (ours, theirs) in columns.items():
        differs = np.flatnonzero(ours != theirs)
        if len(differs):
            at = int(differs[0])
            return f"token {at}: {name} {ours[at]} was trained, {theirs[at]} is recorded"
    return None


def _of_status(turn: Turn) -> str | None:
    """The reason that the turn's own end gives; None: it gives none."""
    match turn.status:
        case TurnStatus.DONE:
            return None
        case TurnStatus.CONTEXT:
            return "given"
        case _:
            return "cut"


def _trained_tokens(line: Line) -> int:
    return sum(
        turn["trained"]
        for group in line["groups"]
        for trial in group["trials"]
        for turn in trial["turns"]
    )


def _weights(path: Path) -> str | None:
    """The hash of exported weights; None if they are not in the type in which they are trained."""
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if any(file.get_slice(name).get_dtype() != "F32" for name in names):
            return None
        return named_hash((name, file.get_tensor(name)) for name in names)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _ids(store: Store, where: SessionFilter) -> AsyncIterator[str]:
    """The ids of all sessions, page by page."""
    while page := await store.list_sessions(where):
        for session in page:
            yield session.session_id
        where = replace(where, after=page[-1].session_id)
