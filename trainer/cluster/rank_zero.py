"""The event loop's access to rank 0 of the trainer, which runs in a thread or in a Ray actor.

The loop sends it requests: small frozen dataclasses whose method `on` is their only handler and
runs where the models are. Requests are served one at a time, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from proxy.records import ServedPolicy
from trainer.algorithms.token_loss import Metrics
from trainer.checkpoint import Checkpoints
from trainer.learning.learner import RunState
from trainer.learning.policies import Learners
from trainer.weight_sync.dtypes import Report, dtype_name
from trainer.weight_sync.published import Published

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RANK_END_KNOWN_S = 5.0
"""Seconds within which the parent knows the end of a rank after the rank's connections closed."""


class RankRequest(Protocol[T_co]):
    """A request to rank 0. It is pickled if rank 0 is a Ray actor."""

    def on(self, learners: Learners) -> T_co: ...


class SendRequest(Protocol):
    """Sends a request to the trainer, and returns the result."""

    def __call__(self, request: RankRequest[T], /) -> Awaitable[T]: ...


class RankZero:
    """Example:
    state = await rank_zero.ask(Restore(checkpoints))
    await rank_zero.ask(Connect(urls))
    sent = await rank_zero.ask(SyncWeights())
    """

    def __init__(self, send: SendRequest, others: asyncio.Task[None] | None = None) -> None:
        """`others` is a task that fails with a TrainerError when a rank other than 0 has ended."""
        self._send = send
        self._others = others

    async def ask(self, request: RankRequest[T]) -> T:
        """Returns the request's result, or raises the error of its handler."""
        try:
            return await self._send(request)
        except RuntimeError as error:  # collectives raise it if another rank has ended
            if self._others is None:
                raise
            await asyncio.wait({self._others}, timeout=RANK_END_KNOWN_S)
            if self._others.done() and (why := self._others.exception()) is not None:
                raise why from error
            raise


class OneThread:
    """Serves requests to rank 0 one at a time, in a thread of this process. On exit it closes the
    learners' connections."""

    def __init__(self, learners: Learners) -> None:
        self._learners = learners
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rank-0")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._learners.close()

    async def send(self, request: RankRequest[T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, request.on, self._learners)


@dataclass(frozen=True, slots=True)
class Restore:
    """Loads the last checkpoint."""

    checkpoints: Checkpoints

    def on(self, learners: Learners) -> RunState:
        return learners.restore(self.checkpoints)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Gives memory that no tensor uses back to the GPUs, before an engine starts on one."""

    def on(self, learners: Learners) -> None:
        learners.free_cache()


@dataclass(frozen=True, slots=True)
class Connect:
    """Connects the learners to their engines, which do not have their weights yet."""

    engine_urls: Sequence[str]
    adapters: Path | None = None
    """Folder for the versions of the LoRA adapter."""

    def on(self, learners: Learners) -> None:
        learners.connect(self.engine_urls, self.adapters)


@dataclass(frozen=True, slots=True)
class SentWeights:
    """What every engine has received."""

    metrics: Metrics
    served: tuple[ServedPolicy, ...] = ()
    """The versions of adapters that the engines have; empty if they got the trained weights."""


@dataclass(frozen=True, slots=True)
class SyncWeights:
    """Sends the weights of each policy to every engine."""

    def on(self, learners: Learners) -> SentWeights:
        metrics = learners.sync_weights()
        return SentWeights(metrics, learners.served)


@dataclass(frozen=True, slots=True)
class DescribeWeights:
    """Name, trained type and shape of each weight that is published; empty: an adapter is."""

    def on(self, learners: Learners) -> list[tuple[str, str, list[int]]]:
        learner = learners.only
        if learner.config.model.policy:
            return []
        shapes = learner.models.policy.hf_shapes()
        return [(name, dtype_name(each.dtype), list(each.shape)) for name, each in shapes]


@dataclass(frozen=True, slots=True)
class PublishWeights:
    """Publishes the weights for relay workers."""

    run: str
    held: tuple[Report, ...] = ()
    """In which types the workers' engines hold the weights, as far as they have said so."""

    def on(self, learners: Learners) -> Published:
        return learners.publish_weights(self.run, self.held)


@dataclass(frozen=True, slots=True)
class Save:
    """Writes a checkpoint; `loop` is the training loop's own state."""

    checkpoints: Checkpoints
    loop: dict[str, Any]
    best: bool

    def on(self, learners: Learners) -> None:
        learners.save(self.checkpoints, self.loop, best=self.best)
