"""The trained tokens of each step as columns on disk, which the page shows (docs/view.md).

    tokens/step-000012/trials.json      {"trials": ["sum-1-x", …], "starts": [0, 512, …, N]}
                       turns.npy        [N] int32, index of the token's turn in its session
                       positions.npy    [N] int32, the token's position on the path of its turn
                       advantages.npy   [N] float32
                       trained.npy      [N] bool, False where the algorithm left the token out
                       logprobs.npy     [N] float32, the trainer's own, before the update
                       entropies.npy    [N] float32, in nats, in the same forward pass

The last two are missing if the algorithm has no such pass (`algorithm.prox`).

Invariant: the rows `[starts[i], starts[i + 1])` belong to `trials[i]`, in the order of turns and
positions. A step's folder is complete as soon as it exists. Writing takes place in a thread; at
most one step waits in memory.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.batch import Batch

_STEP = re.compile(r"\.?step-(\d+)")
"""Name of a step's folder; one with a dot is incomplete."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The `N` tokens of a step, of which those of a trial are adjacent.

    Example: two trials, the second with one token:
        trials=("a", "b")   starts=[0 2 3]   columns={"turns": [0 0 0], "positions": [2 3 2], …}
    """

    trials: tuple[str, ...]
    starts: list[int]
    columns: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, batch: Batch, trained_sequences: Tensor) -> TokenColumns:
        """The columns of a batch that has advantages; the algorithm trains these sequences."""
        rollout, turns, positions = (
            each.numpy() for each in (batch.rollout, batch.turns, batch.position)
        )
        order = np.lexsort((positions, turns, rollout))
        counts = np.bincount(rollout, minlength=batch.num_rollouts)
        columns: dict[str, npt.NDArray[Any]] = {
            "turns": turns.astype(np.int32),
            "positions": positions.astype(np.int32),
            "trained": torch.isin(batch.sequence, trained_sequences).numpy(),
        }
        known = {
            "advantages": batch.advantages,
            "logprobs": batch.prox_logprobs,
            "entropies": batch.entropies,
        }
        for name, column in known.items():
            if column is not None:
                columns[name] = column.float().numpy()
        return cls(
            batch.trial_ids,
            [0, *np.cumsum(counts).tolist()],
            {name: column[order] for name, column in columns.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[TokenColumns]) -> TokenColumns:
        """The columns of several policies, which have trained different tokens of the trials."""
        if len(parts) == 1:
            return parts[0]
        trials = tuple(dict.fromkeys(trial for part in parts for trial in part.trials))
        number = {trial: index for index, trial in enumerate(trials)}
        rollout = np.concatenate(
            [np.repeat([number[t] for t in part.trials], np.diff(part.starts)) for part in parts]
        )
        columns = {
            name: np.concatenate([part.columns[name] for part in parts])
            for name in parts[0].columns
        }
        order = np.lexsort((columns["positions"], columns["turns"], rollout))
        counts = np.bincount(rollout, minlength=len(trials))
        return cls(
            trials,
            [0, *np.cumsum(counts).tolist()],
            {name: column[order] for name, column in columns.items()},
        )


class TokenLog:
    """Example: TokenLog(Path("run/tokens"), max_bytes=1 << 30, warn=print)"""

    def __init__(self, folder: Path, max_bytes: int, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._warn = warn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-log")
        self._pending: Future[None] | None = None
        self._bytes: dict[Path, int] = {}
        """The folders of the steps and their sizes, the oldest first."""
        folder.mkdir(exist_ok=True)
        for path in sorted(_steps(folder)):
            self._bytes[path] = _size(path)

    def write(self, step: int, tokens: TokenColumns) -> None:
        """Writes the columns in the background, once those of the step before are written."""
        self._finish()
        self._pending = self._thread.submit(self._write, step, tokens)

    def close(self) -> None:
        self._finish()
        self._thread.shutdown()

    def _finish(self) -> None:
        if self._pending is None:
            return
        try:
            self._pending.result()
        except OSError as error:
            self._warn(
                f"warning: the tokens of a step could not be written to {self._folder} ({error});"
                " the page shows no advantages for this step"
            )

    def _write(self, step: int, tokens: TokenColumns) -> None:
        path = self._folder / f"step-{step:06d}"
        partial = self._folder / f".{path.name}"
        try:
            partial.mkdir()
            index = {"trials": tokens.trials, "starts": tokens.starts}
            (partial / "trials.json").write_text(json.dumps(index))
            for name, column in tokens.columns.items():
                np.save(partial / f"{name}.npy", column)
            self._bytes[path] = _size(partial)
            partial.rename(path)
        finally:
            with suppress(FileNotFoundError):
                shutil.rmtree(partial)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        for path in list(self._bytes):
            if sum(self._bytes.values()) <= self._max_bytes:
                return
            del self._bytes[path]
            with suppress(FileNotFoundError):  # somebody else may remove old steps too
                shutil.rmtree(path)


def remove_steps_after(last_step: int, folder: Path) -> None:
    """Removes the steps that a continued run repeats, and what a killed process left of a step."""
    for path, step in _steps(folder).items():
        if step > last_step or path.name.startswith("."):
            shutil.rmtree(path)


def _steps(folder: Path) -> dict[Path, int]:
    """The folders of steps, also of incomplete ones, and the number of each step. Nothing else in
    the folder is touched."""
    found = ((path, _STEP.fullmatch(path.name)) for path in folder.glob("*"))
    return {path: int(name[1]) for path, name in found if name is not None and path.is_dir()}


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
