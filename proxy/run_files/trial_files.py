"""What a trial's agent printed and what judged it, from the folder that a run keeps of the trial.

Invariant: a request reads a bounded piece of a regular file of the trial's folder, whatever links
and names agents and verifiers left there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import TypedDict

AGENT_FILES = ("agent.log",)
VERIFIER_FILES = (
    *("verifier.log", "verifier.stderr.log", "grader.log", "graded.json"),
    *("reward/reward.json", "reward/reward.txt"),
)
_REWARD_FAILED = "RewardError"
END_BYTES = 4_000
"""Of each file in the list; about 50 lines."""
PIECE_BYTES = 64_000
"""Of a file when the reader asks for more."""
_CHARACTER_BYTES = 4
"""Of the longest character in UTF-8."""

FilePiece = TypedDict("FilePiece", {"name": str, "text": str, "from": int, "bytes": int})
"""Answer of `GET /view/run/file`: a piece of a trial's file. `from`: the byte at which it begins,
and so the parameter `before` of the piece before it; `bytes`: size of the file."""


class TrialFiles:
    """Example: TrialFiles(Path("runs/quickstart/trials"), "sum-17-9fJq").ends(VERIFIER_FILES)"""

    def __init__(self, trials: Path, trial_id: str) -> None:
        """`trials`: the folder of all trials."""
        self._trials = trials
        is_name = trial_id not in ("", ".", "..") and not {"/", "\0"} & set(trial_id)
        self._folder = trials / trial_id if is_name else None

    def ends(self, names: tuple[str, ...], most: int = END_BYTES) -> list[FilePiece]:
        """The end of each of the files that is there and not empty."""
        found = (self.before(name, None, most) for name in names)
        return [piece for piece in found if piece is not None and piece["bytes"]]

    def last_words(self, error: str) -> str:
        """What the program that failed printed last: what judged the trial if `error` says that the
        reward failed, else the agent; of the other one, if it printed nothing."""
        names = [*AGENT_FILES, *VERIFIER_FILES]
        if error.startswith(_REWARD_FAILED):
            names = [*VERIFIER_FILES, *AGENT_FILES]
        return next((text for end in self.ends(tuple(names)) if (text := end["text"].strip())), "")

    def before(self, name: str, end: int | None, most: int = PIECE_BYTES) -> FilePiece | None:
        """The last `most` bytes, or a few fewer, before the byte `end` (None: of the file). None
        if there is no such file."""
        with _regular_file(self._trials, self._folder, name) as file:
            if file is None:
                return None
            size = os.fstat(file).st_size
            end = size if end is None else min(end, size)
            start = max(0, end - most)
            raw = os.pread(file, end - start, start)
        if start:  # at the first byte of a character
            head = raw[:_CHARACTER_BYTES]
            inside = next((n for n, byte in enumerate(head) if byte & 0xC0 != 0x80), 0)
            start, raw = start + inside, raw[inside:]
        return {"name": name, "text": raw.decode(errors="replace"), "from": start, "bytes": size}


@contextmanager
def _regular_file(trials: Path, folder: Path | None, name: str) -> Iterator[int | None]:
    """A descriptor; None for everything but a regular file below `folder` that no link leads to."""
    file = None
    if folder is not None and name in (*AGENT_FILES, *VERIFIER_FILES):
        with suppress(OSError, ValueError):  # such as a name with a lone surrogate
            path = folder / name
            real = os.path.join(os.path.realpath(trials), path.relative_to(trials))
            if os.path.realpath(path) == real:
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if file is None:
        yield None
        return
    try:
        yield file if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)
