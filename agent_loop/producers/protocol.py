"""The interface of a producer: it runs trials with a `RunsTrials`, and returns a training step's
groups of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agent_loop.records import Group, Rollout, Task
from proxy.records import Origin, SessionKind


class RunsTrials(Protocol):
    """What runs a trial and returns its rollout: `RemoteAgentLoop`, or a script in tests."""

    async def run(
        self,
        task: Task,
        *,
        kind: SessionKind,
        seed: int = 0,
        version: int = 0,
        origin: Origin | None = None,
    ) -> Rollout: ...


class Producer(Protocol):
    """Implementations: `SyncProducer`, `AsyncProducer`, and the swarm's `SwarmProducer`."""

    counts: Counter[str]
    """Number of groups in the run, by outcome."""

    def start(self, version: int, state: Mapping[str, Any] | None = None) -> None:
        """Called once, when the engines have the weights; `state` comes from a checkpoint."""
        ...

    async def next_batch(self, version: int) -> list[Group]:
        """The groups of the next training step, for a trainer at `version`."""
        ...

    def set_version(self, version: int) -> None:
        """Called when the engines sample with the weights of `version` from now on."""
        ...

    def pause(self) -> None:
        """Called when an evaluation begins: no trial of training starts until `resume`."""
        ...

    def resume(self) -> None:
        """Called when the evaluation has ended."""
        ...

    def state(self) -> dict[str, Any]:
        """The state after the last batch, as values that JSON can hold; for a checkpoint."""
        ...

    def acknowledge(self, state: Mapping[str, Any]) -> None:
        """Called when a checkpoint with this state is durable."""
        ...

    async def close(self) -> None:
        """Ends every trial."""
        ...


PRODUCER_MEMBERS = (
    *("acknowledge", "close", "counts", "next_batch", "pause", "resume", "set_version", "start"),
    "state",
)
"""What an object needs to be a `Producer`."""


@dataclass(frozen=True, slots=True)
class Production:
    """How far the next batch is, in groups. Example: Production(3, 8, 5, max_staleness=1)"""

    ready: int
    needed: int
    """Number of groups of a batch."""
    running: int
    max_staleness: int
    """Versions by which the groups of the batch may be older than the trainer's weights."""


LeftOut = Callable[[Group, str], None]
"""Takes a finished group that will not be trained, and the reason."""


class Judging(Protocol):
    """What decides which groups are trained."""

    left_out: LeftOut


@runtime_checkable
class Judges(Protocol):
    """A producer that says which groups it leaves out."""

    intake: Judging


@runtime_checkable
class ReportsProduction(Protocol):
    """A producer whose progress the page shows."""

    @property
    def production(self) -> Production: ...
