"""Rank 0 of the trainer: the controller, its checkpoints, and its lines to the engines.

Everything in it blocks: the loop calls it through `trainer.cluster.trainer.Trainer`, in a thread or
in an actor. Invariant: one call at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from agent_loop.records import Group
from trainer.checkpoint import Checkpoints
from trainer.config import TrainerConfig
from trainer.controller import TrainController
from trainer.errors import TrainingError, WeightSyncError
from trainer.policy.learner import Learner
from trainer.policy.probe import score_ids
from trainer.policy.token_loss import Metrics
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """What a call came to. Example: Progress({"actor/loss": 0.1, …}, step=7, version=6)"""

    metrics: Metrics
    step: int
    version: int


def _alone(
    method: Callable[Concatenate[LeadRank, P], T],
) -> Callable[Concatenate[LeadRank, P], T]:
    @functools.wraps(method)
    def call(self: LeadRank, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return call


class LeadRank:
    def __init__(
        self,
        config: TrainerConfig,
        learner: Learner,
        checkpoints: Checkpoints,
        probe: Sequence[int] = (),
    ) -> None:
        """`probe`: what trainer and engine are compared on after each update; none: nothing."""
        self.lock = threading.Lock()
        self._config = config
        self._learner = learner
        self._checkpoints = checkpoints
        self._probe = probe
        self._state: dict[str, Any] = {}
        self._controller: TrainController | None = None

    @property
    def controller(self) -> TrainController:
        if self._controller is None:
            raise TrainingError("the trainer has no engines yet: connect them first")
        return self._controller

    @_alone
    def restore(self) -> dict[str, Any]:
        """The run's part of the last checkpoint, its tensors loaded; empty without one.

        Raises:
            CheckpointError: it is of another architecture or another kind of optimizer.
        """
        saved = self._checkpoints.latest()
        if saved is not None:
            self._checkpoints.load(saved, self._learner)
            self._state = self._checkpoints.read_run(saved)
        return self._state

    @_alone
    def connect(self, engine_urls: Sequence[str]) -> None:
        """The engines that get the weights from now on."""
        config = self._config
        sync = WeightSync(EngineControl(engine_urls), config.engine.weight_transfer)
        if self._controller is None:
            self._controller = TrainController(config, self._learner, sync, self._probe)
            if self._state:
                self._controller.restore(self._state)
        else:
            self._controller.sync.close()
            self._controller.sync = sync

    @_alone
    def learn(self, groups: Sequence[Group]) -> Progress:
        """As `TrainController.learn`, with `engine.sleep` while the engines sleep."""
        with self._engines_asleep() if self._config.engine.sleep else nullcontext():
            return self._progress(self.controller.learn(groups))

    @_alone
    def sync_weights(self) -> Progress:
        """As `TrainController.sync_weights`."""
        return self._progress(self.controller.sync_weights())

    @_alone
    def score(self, ids: Sequence[int]) -> list[float]:
        """log p(ids[t] | ids[:t]) at temperature 1 for t = 1 … T-1, under the present weights."""
        return score_ids(self._learner, ids)

    @_alone
    def save(self, run: dict[str, Any], best: bool) -> None:
        """A checkpoint of this step, with what `run` says of the loop.

        Raises:
            CheckpointError: it could not be written; the earlier ones are untouched.
        """
        controller, model = self.controller, self._config.model.path
        state = controller.state() | run
        self._checkpoints.save(controller.step, self._learner, state, model, best=best)

    @_alone
    def close(self) -> None:
        if self._controller is not None:
            self._controller.sync.close()

    @contextmanager
    def _engines_asleep(self) -> Iterator[None]:
        # An engine that ended meanwhile is found, and replaced, by who keeps it running.
        with suppress(WeightSyncError):
            self.controller.sync.control.sleep()
        try:
            yield
        finally:
            with suppress(WeightSyncError):
                self.controller.sync.control.wake_up()

    def _progress(self, metrics: Metrics) -> Progress:
        return Progress(metrics, self.controller.step, self.controller.version)
