"""The trained tokens of each step: their columns from a batch, and their writing in a thread.

The format is in `proxy.run_files.tokens`. `logprobs` and `entropies` are missing if the algorithm
has no forward pass before the update (`algorithm.prox`).

Invariant: at most one step waits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proxy.run_files.tokens import TokenSteps
from trainer.batch import Batch


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
        self._steps = TokenSteps(folder, max_bytes)
        self._warn = warn
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-log")
        self._pending: Future[None] | None = None

    def write(self, step: int, tokens: TokenColumns) -> None:
        """Writes the columns in the background, once those of the step before are written."""
        self._finish()
        self._pending = self._thread.submit(
            self._steps.write, step, tokens.trials, tokens.starts, tokens.columns
        )

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
