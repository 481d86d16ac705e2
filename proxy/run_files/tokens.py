"""The trained tokens of each step as columns on disk, which the page shows (docs/publishing.md).

    tokens/step-000012/trials.json      {"trials": ["sum-1-x", …], "starts": [0, 512, …, N]}
                       turns.npy        [N] int32, index of the token's turn in its session
                       positions.npy    [N] int32, the token's position on the path of its turn
                       advantages.npy   [N] float32
                       trained.npy      [N] bool, False where the algorithm left the token out
                       logprobs.npy     [N] float32, the trainer's own, before the update
                       entropies.npy    [N] float32, in nats, of the policy before the update

The last four may be missing. Invariant: the rows `[starts[i], starts[i + 1])` belong to
`trials[i]`, in the order of turns and positions. A step's folder is complete as soon as it exists.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PLACES = ("turns", "positions")
VALUES = ("advantages", "logprobs", "entropies", "trained")
_STEP = re.compile(r"\.?step-(\d+)")
"""Name of a step's folder; one with a dot is incomplete."""


class TokenSteps:
    """The folder `tokens/` of a run, which has one writer at a time.

    Example: TokenSteps(Path("run/tokens"), max_bytes=1 << 30).write(12, ["a"], [0, 3], columns)
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: size above which the oldest steps are removed."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._bytes: dict[Path, int] = {}
        """The folders of the steps and their sizes, the oldest first."""
        folder.mkdir(exist_ok=True)
        for path in sorted(_steps(folder)):
            self._bytes[path] = _size(path)

    def write(
        self,
        step: int,
        trials: Sequence[str],
        starts: Sequence[int],
        columns: Mapping[str, npt.NDArray[Any]],
    ) -> None:
        """Writes the columns of a step, in place of those that it has.

        Raises:
            OSError: they could not be written; nothing of them is left.
        """
        path = self._folder / f"step-{step:06d}"
        partial = self._folder / f".{path.name}"
        try:
            partial.mkdir()
            index = {"trials": trials, "starts": starts}
            (partial / "trials.json").write_text(json.dumps(index), encoding="utf-8")
            for name, column in columns.items():
                np.save(partial / f"{name}.npy", column)
            self._bytes.pop(path, None)
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
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
