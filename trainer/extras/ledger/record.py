"""`Record`: what a deterministic run recorded, as its commands read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from agent_loop.records import Group
from trainer.checkpoint import Checkpoints, Saved
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.extras.ledger.ledger import (
    LedgerError,
    Line,
    batch_file,
    read_batch,
    read_lines,
    steps_in,
)
from trainer.run.folder import RunFolder
from trainer.settings.sources import load


@dataclass(frozen=True)
class Record:
    """What a deterministic run recorded. Example: Record.open(Path("runs/a"))"""

    folder: RunFolder
    config: TrainerConfig
    lines: Mapping[int, Line]
    """Step → its line."""
    first: Line
    """The ledger's first line."""
    head: str
    """The hash of the ledger's last line."""
    changed_at: int = 0
    """The last step after which the run went on with another configuration."""
    forgotten: frozenset[int] = frozenset()
    """Steps of which nothing was left to train."""

    @classmethod
    def open(cls, path: Path, words: Sequence[str] = ()) -> Record:
        """`words`: keys with other values than the run had, such as `trainer.device=cpu`.

        Raises:
            ConfigError: it is not the folder of a run.
            LedgerError: it has no ledger, or the chain is broken.
        """
        folder = RunFolder.open(path)
        lines = read_lines(folder.ledger)
        alone = ["engine.sleep=false", "engine.verify=false"]  # there are no engines
        config = load([folder.config], [*alone, *words])  # what the record says, whatever is set
        steps = {int(line["step"]): line for line in steps_in(lines)}
        if not steps:
            raise LedgerError(f"{folder.ledger}: has no step")
        configs = [(int(line["step"]), line["config"]) for line in lines if "config" in line]
        changes = (at for (_, old), (at, new) in pairwise(configs) if old != new)
        changed_at = max(changes, default=0)
        forgotten = frozenset(int(line["step"]) for line in lines if line.get("forgotten"))
        head = lines[-1]["hash"]
        return cls(folder, config, steps, lines[0], head, changed_at, forgotten)

    def check_configuration(self, start: int, last: int, words: Sequence[str] = ()) -> None:
        """Raises ConfigError: steps after `start` were computed with another configuration than
        this one; `words` may be what they had."""
        at = self.changed_at
        if start < at and (last > at or not words):
            raise ConfigError(
                f"{self.folder.path}: the run went on with another configuration after step {at}: "
                f"replay what follows by --from {at}, and what was before by --to {at} and the "
                "keys that it had, such as trainer.steps=24"
            )

    @property
    def last(self) -> int:
        return max(self.lines)

    def lines_until(self, step: int) -> list[Line]:
        """The lines of the steps up to this one."""
        return [self.lines[number] for number in sorted(self.lines) if number <= step]

    def groups(self, step: int) -> list[Group]:
        """Raises LedgerError: the step is not recorded."""
        if step not in self.lines:
            raise LedgerError(f"{self.folder.ledger}: has no step {step}")
        return read_batch(batch_file(self.folder.batches, step))

    @property
    def saved(self) -> Mapping[int, Saved]:
        """The run's checkpoints, by step."""
        found = Checkpoints(self.folder.checkpoints.absolute(), keep_last=1).all()
        return {each.step: each for each in found}

    def checkpoint(self, step: int) -> int:
        """Raises ConfigError: there is no checkpoint of that step; 0 is the model that it began
        with."""
        if step and step not in self.saved:
            there = ", ".join(map(str, sorted(self.saved))) or "none"
            raise ConfigError(f"--from {step}: no checkpoint of that step; there are {there}")
        return step
