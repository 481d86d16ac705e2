"""The mains of a run by name: each trains to the end in its own way, over the same parts.

A main is a module with `train`. It is imported when a run needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from trainer.config import TrainerConfig
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig
from trainer.run.control import Ended, RunControl
from trainer.run.log import RunLog

MAINS: Mapping[str, str] = {
    "colocated": "trainer.mains.colocated",
    "separate": "trainer.mains.separate",
    "swarm": "trainer.extras.swarm",
    "sft": "trainer.extras.sft.main",
}
"""Name → module."""
FOLLOWER = "trainer.cluster.follower"
"""What the other ranks than 0 do, whatever the main."""


class Parts(Protocol):
    """The parts of a run that exist before any process is started."""

    @property
    def config(self) -> TrainerConfig: ...

    @property
    def main(self) -> str:
        """The name of the main that trains with these parts."""
        ...


class Main(Protocol):
    """Implementations: the modules of `MAINS`."""

    def assemble(self, config: TrainerConfig) -> Parts:
        """The parts of a run of fine-tuning. The other mains have those of `trainer.assembly`.

        Raises:
            ConfigError, proxy.errors.ConfigurationError: one line that names the key or file.
        """
        ...

    async def train(self, parts: Any, log: RunLog, control: RunControl) -> Ended:
        """Runs to the end."""
        ...


def main_of(name: str) -> Main:
    """The main with that name."""
    return cast("Main", import_module(MAINS[name]))


def follow_rank_0(config: RanksConfig, seat: Seat) -> None:
    """Trains with rank 0 as the rank of this seat, until rank 0 has finished."""
    import_module(FOLLOWER).follow_rank_0(config, seat)
