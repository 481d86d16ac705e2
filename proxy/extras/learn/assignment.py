"""Which adapter a new session samples from: the stable one, or the canary.

Invariant: a session keeps the adapter that it was created with. The canary gets its share of the
sessions by a fixed pseudo-random sequence, so that no habit of the user decides, and a record can
be checked.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from proxy.run_files.files import replace_file


@dataclass(frozen=True, slots=True)
class Assignment:
    """Example: Assignment(stable=3, canary=5, share=0.5)"""

    stable: int = 0
    """Number of the adapter; 0: the engines' own weights."""
    canary: int | None = None
    share: float = 0.0
    """Share of the new sessions that the canary gets."""
    frozen: bool = False
    """No canary gets sessions, and none is promoted."""
    order: str = ""
    """What a person wants of the canary: `promote` or `rollback`, until the learner has done it."""
    since: float = 0.0
    """Unix time from which a new session has had each adapter with the same probability."""
    created: int = 0
    """Number of sessions that have an adapter by this object."""

    def next(self) -> tuple[int, Assignment]:
        """The adapter of the next session, and what follows."""
        after = replace(self, created=self.created + 1)
        canary = None if self.frozen or self.order == "rollback" else self.canary
        if self.order == "promote" and canary is not None:
            return canary, after
        if canary is None or _draw(canary, self.created) >= self.share:
            return self.stable, after
        return canary, after

    def changed(self, at: float, **more: Any) -> Assignment:
        """With these fields; `at`: the Unix time, which is `since` if they change anything."""
        after = replace(self, **more)
        return self if after == self else replace(after, since=at)

    def write(self, path: Path) -> None:
        replace_file(path, orjson.dumps(asdict(self)).decode())
        os.chmod(path, 0o600)

    @classmethod
    def read(cls, path: Path) -> Assignment:
        """What was written last; the default if nothing was."""
        try:
            return cls(**orjson.loads(path.read_bytes()))
        except FileNotFoundError:
            return cls()


def _draw(canary: int, number: int) -> float:
    """In [0, 1)."""
    digest = sha256(f"{canary}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
