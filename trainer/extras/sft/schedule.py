"""Which demonstrations are trained at which step, and which are held out.

Invariant: every demonstration is in exactly one batch of each epoch, and the n-th batch is a
function of the demonstrations, the seed and n alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from trainer.errors import ConfigError
from trainer.extras.sft.demonstrations import Demonstration


@dataclass(frozen=True, slots=True)
class Schedule:
    """Example: Schedule(train, batch_sessions=16, epochs=2, seed=0).batch(step=1)"""

    demonstrations: Sequence[Demonstration]
    batch_sessions: int
    epochs: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.demonstrations) // self.batch_sessions)

    @property
    def steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def order(self) -> str:
        """Identifies the batches of each epoch and their order; the number of epochs may differ."""
        total = sha256(f"{self.batch_sessions} {self.seed}".encode())
        for each in self.demonstrations:
            total.update(f" {each.rollout.trial_id}".encode())
        return total.hexdigest()

    def batch(self, step: int) -> list[Demonstration]:
        """The batch of a step, from 1 to `steps`. The batches of an epoch differ in size by at most
        one demonstration."""
        epoch, number = divmod(step - 1, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.demonstrations))
        share = np.array_split(order, self.steps_per_epoch)[number]
        return [self.demonstrations[index] for index in share]


def split(
    demonstrations: Sequence[Demonstration], share: float, seed: int
) -> tuple[list[Demonstration], list[Demonstration]]:
    """`(trained, held out)`: the demonstrations of a `share` of the tasks are held out, and those
    of at least one task are trained.

    Raises:
        ConfigError: there are too few tasks to hold one out.
    """
    tasks = sorted({each.task_id for each in demonstrations})
    count = min(round(share * len(tasks)) or int(share > 0), len(tasks) - 1)
    if share > 0 and not count:
        raise ConfigError(
            f"sft.held_out={share}: all sessions are of one task; record more tasks, or remove it"
        )
    order = np.random.default_rng(seed).permutation(len(tasks))
    chosen = {tasks[index] for index in order[:count]}
    return (
        [each for each in demonstrations if each.task_id not in chosen],
        [each for each in demonstrations if each.task_id in chosen],
    )
