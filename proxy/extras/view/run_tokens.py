"""What the trainer knows of the tokens of a run: advantages, probabilities, entropies, mask.

docs/publishing.md describes the files. They are mapped into memory, so that a request reads the
rows of one trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from proxy.extras.view.answers import TrainedTokens
from proxy.extras.view.turn_tokens import TokenSpan
from proxy.extras.view.typed_fields import as_type
from proxy.http.valid_json import read_json

COLUMNS = ("advantages", "logprobs", "entropies", "trained")


class _Rows(TypedDict):
    """`trials.json`: the trials of a step, and the row at which each begins."""

    trials: list[str]
    starts: list[int]


@dataclass(frozen=True, slots=True)
class TrialTokens:
    """The trained tokens of one trial, `[N]`, in the order of turns and positions."""

    step: int
    keys: npt.NDArray[np.int64]
    """Turn and position of each token as one number."""
    columns: dict[str, npt.NDArray[Any]]

    @property
    def trained(self) -> int:
        """Number of tokens that the step trained, as far as it says which."""
        trained = self.columns.get("trained")
        return len(self.keys) if trained is None else int(trained.sum())

    @property
    def advantage(self) -> float | None:
        """Mean over the tokens; None if the step does not have it."""
        column = self.columns.get("advantages")
        return None if column is None or not len(column) else _plain(float(column.mean()))

    def page(self, spans: Sequence[TokenSpan], start: int, end: int) -> TrainedTokens:
        """The columns for the tokens `[start, end)` of a path, None where the trainer did not use
        the token."""
        turns = np.full(end - start, -1, np.int64)
        for span in spans:
            if span.sampled:
                turns[max(0, span.start - start) : max(0, span.end - start)] = span.turn
        wanted = _key(turns, np.arange(start, end))
        places = np.searchsorted(self.keys, wanted)
        places[places == len(self.keys)] = 0
        known = (turns >= 0) & (self.keys[places] == wanted) if len(self.keys) else turns < -1
        page: dict[str, Any] = {"step": self.step}
        for name, column in self.columns.items():
            values = column[places].tolist()
            page[name] = [
                _plain(value) if has else None for value, has in zip(values, known, strict=True)
            ]
        return cast("TrainedTokens", page)


class RunTokens:
    """The folder `tokens/` of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[tuple[Path, int]] = set()
        """The folders of steps that were read, with their inodes: a continued run replaces some."""
        self._places: dict[str, tuple[Path, int, int]] = {}
        """Trial → the folder of the step that trained it last, and its rows."""

    def of(self, trial_id: str) -> TrialTokens | None:
        """None if no step that is kept trained this trial."""
        try:
            self._read_new()
            if trial_id not in self._places:
                return None
            folder, start, end = self._places[trial_id]
            turns, positions = (_rows(folder, name, start, end) for name in ("turns", "positions"))
            columns = {
                name: _rows(folder, name, start, end)
                for name in COLUMNS
                if (folder / f"{name}.npy").is_file()
            }
            step = int(folder.name.removeprefix("step-"))
            if any(each.shape != turns.shape for each in (positions, *columns.values())):
                return None
            return TrialTokens(step, _key(turns, positions), columns)
        except (OSError, EOFError, ValueError):  # removed since, or written by another program
            return None

    def _read_new(self) -> None:
        if not self._folder.is_dir():
            return
        there = {
            (path, path.stat().st_ino)
            for path in self._folder.glob("step-*")
            if (path / "trials.json").is_file()
        }
        if gone := {path for path, _ in self._read - there}:
            self._places = {
                trial: place for trial, place in self._places.items() if place[0] not in gone
            }
        for path, _ in sorted(there - self._read):
            index = as_type(_Rows, read_json((path / "trials.json").read_bytes()))
            if index is not None:
                ends = index["starts"][1:]
                for trial, start, end in zip(index["trials"], index["starts"], ends, strict=False):
                    self._places[trial] = (path, start, end)
        self._read = there


def _rows(folder: Path, name: str, start: int, end: int) -> npt.NDArray[Any]:
    whole = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return np.array(whole[start:end])


def _key(turns: npt.NDArray[Any], positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return turns.astype(np.int64) * 2**32 + positions.astype(np.int64)


def _plain(value: float | bool) -> float | bool | None:
    if isinstance(value, bool):
        return value
    return round(value, 6) if np.isfinite(value) else None
