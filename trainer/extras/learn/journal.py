"""The journal of a learner: a line of JSON per decision, in the ledger's chain of hashes.

    {"kind": "session", "session": …, "value": 1.0, "findings": […], "adapter": 3, …}
    {"kind": "update", "number": 5, "parent": 3, "sessions": […], "replayed": […], "groups": …}
    {"kind": "gate", "number": 5, "passed": true, "measures": {…}}
    {"kind": "canary", "number": 5, "stable": 3, "share": 0.5}
    {"kind": "compare", "number": 5, "since": …}
    {"kind": "promote" | "rollback", "number": 5, "by": "test" | "person" | …, "better": 12.1, …}
    {"kind": "freeze" | "thaw", "by": "person", "person": "ann", "said_at": …, "switch": …}
    {"kind": "order", "order": "promote" | "rollback", "number": 5, "person": "ann", …}
    {"kind": "forgot", "replaced": {"5": 8}, "last": 9, "set_aside": […], "tried": […], …}

`History` is what the lines say. Invariant: the journal is the learner's only state; a learner that
is killed continues from it. A line is written before what it says is done.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agent_loop.producers.rollout_format import encode_group
from agent_loop.records import Group
from proxy.extras.learn.section import JOURNAL_FILE
from proxy.run_files.files import drop_incomplete_line, replace_file
from trainer.extras.learn.canary import Compared, Comparison
from trainer.extras.ledger.ledger import Line, line_hash, read_batch, read_lines


class Journal:
    """Example: journal = Journal(folder); journal.write("canary", number=5, stable=3)"""

    def __init__(self, folder: Path) -> None:
        """Raises LedgerError: the chain of the journal that is there is broken."""
        self._folder = folder
        self._path = folder / JOURNAL_FILE
        drop_incomplete_line(self._path)
        has_lines = self._path.exists() and self._path.stat().st_size > 0
        self.lines: list[Line] = read_lines(self._path) if has_lines else []
        (folder / "batches").mkdir(exist_ok=True, mode=0o700)

    @property
    def head(self) -> str:
        return str(self.lines[-1]["hash"]) if self.lines else ""

    def write(self, kind: str, **more: Any) -> Line:
        """Returns once the line is on the disk."""
        line = _chained({"kind": kind, "at": time.time(), **more}, self.head)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)
        return line

    def replace(self, lines: Iterable[Line]) -> None:
        """Writes these lines in place of all, in a new chain."""
        self.lines = []
        for line in lines:
            bare = {name: value for name, value in line.items() if name not in ("hash", "previous")}
            self.lines.append(_chained(bare, self.head))
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in self.lines))
        os.chmod(self._path, 0o600)

    def keep_batch(self, number: int, groups: Sequence[Group]) -> str:
        """Writes the batch of an update; returns its hash."""
        data = msgspec.msgpack.encode([encode_group(group) for group in groups])
        path = self.batch_file(number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
        return hashlib.sha256(data).hexdigest()

    def batch(self, number: int) -> list[Group]:
        """Raises LedgerError: the batch is missing or damaged."""
        return read_batch(self.batch_file(number))

    def batch_file(self, number: int) -> Path:
        return self._folder / "batches" / f"{number:06d}"


def _chained(line: Line, previous: str) -> Line:
    chained = {**line, "previous": previous}
    return {**chained, "hash": line_hash(chained)}


@dataclass(slots=True)
class History:
    """What a journal says. Example: History.of(journal.lines).stable"""

    sessions: dict[str, Line] = field(default_factory=dict)
    """Judged session → its line."""
    updates: dict[int, Line] = field(default_factory=dict)
    """Adapter → the line of its update."""
    stable: int = 0
    canary: int | None = None
    share: float = 0.5
    """Share of the new sessions that the canary gets."""
    compared_since: float = math.inf
    """Sessions that were created since then had the canary with the probability `share`."""
    pending: int | None = None
    """An adapter whose gates are not passed yet."""
    set_aside: set[str] = field(default_factory=set)
    """Sessions of batches that did harm."""
    interrupted: set[int] = field(default_factory=set)
    """Adapters that were not finished."""
    frozen: bool = False
    """Whether a person has stopped promotions and updates."""
    switches: list[str] = field(default_factory=list)
    """The names of a person's orders, in order."""
    last: int = 0
    """The largest number that an adapter has or had."""
    replaced: dict[int, int] = field(default_factory=dict)
    """Adapter that is gone, because sessions were forgotten → the one in its place."""
    tried_before: set[str] = field(default_factory=set)
    """Sessions that were new in some update, of those whose lines are gone, too."""

    @classmethod
    def of(cls, lines: Iterable[Line]) -> History:
        found = cls()
        for line in lines:
            found.take(line)
        return found

    def take(self, line: Line) -> None:
        number = line.get("number", 0)
        self.last = max(self.last, number)
        if "switch" in line:
            self.switches.append(line["switch"])
        match line["kind"]:
            case "session":
                known = self.sessions.get(line["session"])
                if known is not None and known["outcome"] is None:
                    del self.sessions[line["session"]]  # its outcome comes after those before it
                self.sessions[line["session"]] = line
            case "update":
                self.updates[number] = line
                self.pending = number
            case "canary":
                self.canary, self.share, self.pending = number, line["share"], None
                self.compared_since = math.inf
            case "compare":
                self.compared_since = line["since"]
            case "promote":
                self.stable, self.canary = number, None
            case "rollback":
                self.canary = None if self.canary == number else self.canary
                self.pending = None if self.pending == number else self.pending
                self.set_aside |= set(line.get("set_aside", ()))
                if line["by"] == "interrupted":
                    self.interrupted.add(number)
            case "freeze" | "thaw":
                self.frozen = line["kind"] == "freeze"
            case "stable":
                self.stable = number
            case "forgot":
                self.last = max(self.last, line.get("last", 0))
                self.set_aside |= set(line.get("set_aside", ()))
                self.tried_before |= set(line.get("tried", ()))
                self.replaced |= {int(old): new for old, new in line.get("replaced", {}).items()}

    def ancestors(self, number: int) -> Iterator[int]:
        """The adapter, its parent, and so on, to 0."""
        while number:
            yield number
            number = self.updates[number]["parent"]
        yield 0

    def ages(self, number: int) -> Mapping[int, int]:
        """Adapter → generations between it and `number`. One that was rolled back is as old as its
        parent, and one that is gone as the one in its place."""
        line = list(self.ancestors(number))
        ages = {each: age for age, each in enumerate(line)}
        for each, update in self.updates.items():
            if each not in ages and update["parent"] in ages:
                ages[each] = ages[update["parent"]]
        for old, each in self.replaced.items():
            if each in ages:
                ages[old] = ages[each]
        return ages

    def learned(self, number: int) -> set[str]:
        """The sessions that an adapter has learned, also those of its ancestors."""
        return {
            session
            for each in self.ancestors(number)
            if each
            for session in (*self.updates[each]["sessions"], *self.updates[each]["replayed"])
        }

    @property
    def tried(self) -> set[str]:
        """The sessions that were new in some update."""
        return self.tried_before | {
            session
            for number, line in self.updates.items()
            if number not in self.interrupted
            for session in line["sessions"]
        }

    def is_compared(self, adapter: int | None, created_at: float) -> bool:
        """Whether a session tells of the canary and the stable adapter."""
        arms = () if self.canary is None else (self.canary, self.stable)
        return adapter in arms and created_at >= self.compared_since

    @property
    def compared(self) -> list[Line]:
        """The judged sessions that tell of the canary and the stable adapter, in order."""
        return [
            line
            for line in self.sessions.values()
            if line["outcome"] is not None and self.is_compared(line["adapter"], line["created_at"])
        ]

    @property
    def comparison(self) -> Comparison:
        """What these say."""
        compared = [
            Compared(line["outcome"], line["adapter"] == self.canary, line["log_ratio"])
            for line in self.compared
        ]
        return Comparison(compared, self.share)
