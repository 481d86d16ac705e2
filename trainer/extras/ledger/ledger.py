"""Writes and reads the ledger of a run, a line of JSON per step.

    {"step": 0, "config": …, "model": {file: …}, "software": {…}, "previous": "", "hash": …}
    {"step": 1, "batch": …, "groups": [{"group": "g0", "trials": [{"trial": …, "status": "done",
     "reward": 1.0, "turns": [{"turn": 0, "tokens": 12, …}]}]}],
     "left_out": [{"trial": …, "reason": "no signal"}],
     "policies": {"": {"gradients": […], "weights": …}}, "previous": …, "hash": …}

`hash` is the SHA-256 of the line as JSON without it, with sorted keys and no blanks; `previous` is
the hash of the line before. Invariant: a line that is changed, removed or moved breaks the chain.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from agent_loop.producers.rollout_format import decode_group, encode_group
from agent_loop.records import Group, Rollout
from proxy.run_files.files import read_jsonl
from trainer.errors import TrainerError
from trainer.extras.ledger.evidence import Evidence
from trainer.policy.checkpoint_type import weight_files
from trainer.run.folder import RunFolder

Line = dict[str, Any]


class LedgerError(TrainerError):
    """The ledger contradicts itself, its files, or the run."""


class Ledger:
    """Example: ledger = Ledger(folder, model); ledger.write(1, groups, evidence); ledger.close()"""

    def __init__(
        self,
        folder: RunFolder,
        model: Path,
        about: Mapping[str, Any] | None = None,
        begins_with: Sequence[Line] = (),
    ) -> None:
        """`model`: the checkpoint that the run begins with. `about` is added to the first line of a
        new ledger, and followed by the lines of the steps that it has from another one. A ledger
        that exists is continued."""
        self._path, self._batches = folder.ledger, folder.batches
        self._batches.mkdir(exist_ok=True)
        self._left_out: list[Line] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._pending: list[Future[None]] = []
        last = next(iter([*read_jsonl(self._path)][-1:]), None)
        self._previous = "" if last is None else str(last["hash"])
        first = {"step": 0, "config": _of_file(folder.config), "software": _software()}
        if last is None:
            self._do(lambda: self._append({**first, "model": _of_model(model), **(about or {})}))
            for line in begins_with:
                self.note(**{k: v for k, v in line.items() if k not in ("previous", "hash")})
        else:  # what comes next may be computed by other software
            self._do(lambda: self._append({**first, "step": last["step"], "continued": True}))

    def left_out(self, group: Group, reason: str) -> None:
        """A finished group will not be trained, for this reason."""
        self._left_out += [
            {"trial": each.trial_id, "tokens": each.sampled_tokens, "reason": _why(each) or reason}
            for each in group.rollouts
        ]

    def write(self, step: int, groups: Sequence[Group], evidence: Evidence, **more: Any) -> None:
        """Writes the step in the background. Raises LedgerError: an earlier one was not written."""
        self._raise_failures()
        left_out, self._left_out = self._left_out, []

        def write() -> None:
            data = msgspec.msgpack.encode([encode_group(group) for group in groups])
            batch_file(self._batches, step).write_bytes(data)
            line = {"step": step, "batch": hashlib.sha256(data).hexdigest()}
            self._append(line | {"left_out": left_out} | line_of_step(groups, evidence) | more)

        self._do(write)

    def note(self, **line: Any) -> None:
        """Writes a line of another kind."""
        self._do(lambda: self._append(line))

    def finish(self) -> None:
        """Returns when everything is written. Raises LedgerError: something could not be."""
        for each in self._pending:
            each.exception()
        self._raise_failures()

    def close(self) -> None:
        self._thread.shutdown()
        self._raise_failures()

    def _do(self, work: Any) -> None:
        self._pending.append(self._thread.submit(work))

    def _raise_failures(self) -> None:
        done = [each for each in self._pending if each.done()]
        self._pending = [each for each in self._pending if not each.done()]
        for each in done:
            if (error := each.exception()) is not None:
                raise LedgerError(f"{self._path}: could not be written ({error})") from error

    def _append(self, line: Line) -> None:
        chained = {**line, "previous": self._previous}
        self._previous = line_hash(chained)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**chained, "hash": self._previous}) + "\n")


def line_of_step(groups: Sequence[Group], evidence: Evidence) -> Line:
    """What a line says of a step's trials, gradients and weights."""
    policies = {
        name: {"gradients": each.gradients, "weights": each.weights}
        for name, each in evidence.policies.items()
    }
    turns: dict[str, list[Any]] = {}
    for each in evidence.policies.values():
        for trial, own in each.turns.items():
            turns.setdefault(trial, []).extend(own)
    listed = [
        {"group": group.group_id, "trials": [_trial(each, turns) for each in group.rollouts]}
        for group in groups
    ]
    return {"groups": listed, "policies": policies, "sums": evidence.sums}


def _trial(rollout: Rollout, turns: Mapping[str, list[Any]]) -> Line:
    line: Line = {
        "trial": rollout.trial_id,
        "seed": rollout.seed,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "turns": sorted(turns.get(rollout.trial_id, ()), key=lambda turn: turn["turn"]),
    }
    if rollout.stale_turns:
        line["stale"] = {str(turn): n for turn, n in sorted(rollout.stale_turns.items())}
    if (reason := _why(rollout)) is not None:
        line["reason"] = reason
    return line


def _why(rollout: Rollout) -> str | None:
    """Why a trial cannot be trained; None if it can."""
    if rollout.trainable:
        return None
    if rollout.stale_turns:
        return "stale"
    if rollout.status.value in ("failed", "aborted"):
        return rollout.status.value
    return "no reward" if rollout.reward is None else "nothing sampled"


def batch_file(batches: Path, step: int) -> Path:
    return batches / f"step-{step:06d}"


def read_batch(file: Path) -> list[Group]:
    """The groups of a step. Raises LedgerError: the file is missing or damaged."""
    try:
        parts = msgspec.msgpack.decode(file.read_bytes(), type=list[bytes])
        return [decode_group(part) for part in parts]
    except (OSError, ValueError, TypeError) as error:
        raise LedgerError(f"{file}: cannot be read ({error})") from error


def read_lines(path: Path) -> list[Line]:
    """The lines of a ledger whose chain is whole.

    Raises:
        LedgerError: there is no ledger, or its chain is broken.
    """
    try:
        lines: list[Line] = list(read_jsonl(path))
    except json.JSONDecodeError as error:
        raise LedgerError(f"{path}: a line is not JSON: {error}") from error
    if not lines:
        raise LedgerError(
            f"{path}: is missing or empty; only runs with trainer.deterministic have one"
        )
    previous = ""
    for number, line in enumerate(lines, 1):
        if line.get("previous") != previous:
            raise LedgerError(f"{path}: line {number} does not follow the line before it")
        if line_hash(line) != line.get("hash"):
            raise LedgerError(f"{path}: line {number} (step {line.get('step')}) was changed")
        previous = line["hash"]
    return lines


def steps_in(lines: Sequence[Line]) -> Iterator[Line]:
    """The lines that are of steps."""
    return (line for line in lines if "policies" in line)


def line_hash(line: Mapping[str, Any]) -> str:
    bare = {name: value for name, value in line.items() if name != "hash"}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _software() -> dict[str, str]:
    return {
        "agentic-rl": version("agentic-rl"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def _of_model(model: Path) -> dict[str, str]:
    return {file.name: _of_file(file) for file in weight_files(model)}


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
