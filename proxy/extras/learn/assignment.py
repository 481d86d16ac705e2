"""Which adapter a new session samples from: the stable one, or the canary.

Invariant: a session keeps the adapter that it was created with. The canary gets its share of the
sessions by a fixed pseudo-random sequence, so that no habit of the user decides, and a record can
be checked. Each order of a person that changes something is a switch, which stays here until the
learner has it in its journal.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from proxy.run_files.files import replace_file

MAX_SWITCHES = 1000
"""Switches that wait for a learner. Each new session writes them again, 150 bytes each."""


@dataclass(frozen=True, slots=True)
class Switch:
    """What a person has ordered. Example: Switch("9f…", "promote", 1.78e9, "ann", canary=5)"""

    name: str
    """By which the learner knows that its journal has it."""
    order: str
    """`promote`, `rollback`, `freeze` or `thaw`."""
    at: float
    """Unix time."""
    person: str
    canary: int | None = None
    """Of `promote` and `rollback`: what it is about."""


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
    switches: tuple[Switch, ...] = ()
    """Those that are not known to be in the learner's journal, in order."""

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

    def switched(self, order: str, at: float, person: str) -> Assignment:
        """After an order of a person; as it is, if that changes nothing."""
        of_canary = order in ("promote", "rollback")
        after = self.changed(
            at, **({"order": order} if of_canary else {"frozen": order == "freeze"})
        )
        if after is self:
            return self
        canary = self.canary if of_canary else None
        switch = Switch(secrets.token_hex(8), order, at, person, canary)
        return replace(after, switches=(*self.switches, switch))

    def told(self, name: str) -> Assignment:
        """Without the switches up to this one, which the learner's journal has."""
        names = [each.name for each in self.switches]
        if name not in names:
            return self
        return replace(self, switches=self.switches[names.index(name) + 1 :])

    def write(self, path: Path) -> None:
        replace_file(path, orjson.dumps(asdict(self)).decode())
        os.chmod(path, 0o600)

    @classmethod
    def read(cls, path: Path) -> Assignment:
        """What was written last; the default if nothing was."""
        try:
            found = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            return cls()
        switches = tuple(Switch(**each) for each in found.pop("switches", ()))
        return cls(**found, switches=switches)


def _draw(canary: int, number: int) -> float:
    """In [0, 1)."""
    digest = sha256(f"{canary}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
