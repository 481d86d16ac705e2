"""The training side as the loop sees it, wherever its ranks run.

Invariant: `step` and `version` are those of rank 0 after the last call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agent_loop.records import Group
from trainer.cluster.lead_rank import LeadRank, Progress
from trainer.errors import WeightSyncError
from trainer.policy.token_loss import Metrics

Call = Callable[..., Awaitable[Any]]
"""`(method of LeadRank, *arguments) → its result`, in a thread or in an actor."""


NEWS_S = 5.0
"""Until the end of a rank whose connections are closed is known."""


class Trainer:
    """Example:
    trainer = Trainer(call)
    state = await trainer.restore()
    await trainer.connect(urls)
    await trainer.sync_weights()
    metrics = await trainer.learn(groups)
    """

    def __init__(self, call: Call, others: asyncio.Task[None] | None = None) -> None:
        """`others` ends with a TrainerError when a rank other than 0 has ended."""
        self._make = call
        self._others = others
        self.step = 0
        """Training steps made."""
        self.version = 0
        """Of the policy's weights."""
        self.recover: Callable[[WeightSyncError], Awaitable[None]] | None = None
        """Returns when engines that had ended are replaced, or raises the error again."""

    async def restore(self) -> dict[str, Any]:
        """What the run goes on from besides the models; empty at its beginning."""
        state: dict[str, Any] = await self._call(LeadRank.restore.__name__)
        if state:
            self.step, self.version = int(state["step"]), int(state["version"])
        return state

    async def connect(self, engine_urls: Sequence[str]) -> None:
        """The engines that get the weights from now on; they have none of ours yet."""
        await self._call(LeadRank.connect.__name__, tuple(engine_urls))

    async def learn(self, groups: Sequence[Group]) -> Metrics:
        """One update from one batch of groups."""
        return self._note(await self._call(LeadRank.learn.__name__, groups))

    async def sync_weights(self) -> Metrics:
        """The policy's weights into every engine; again, where one had ended and was replaced."""
        try:
            return self._note(await self._call(LeadRank.sync_weights.__name__))
        except WeightSyncError as error:
            if self.recover is None:
                raise
            await self.recover(error)
            return await self.sync_weights()

    async def use_engines(self, engine_urls: Sequence[str]) -> None:
        """These from now on, each with the present weights."""
        await self.connect(engine_urls)
        self._note(await self._call(LeadRank.sync_weights.__name__))

    async def score(self, ids: Sequence[int]) -> list[float]:
        """log p(ids[t] | ids[:t]) at temperature 1 for t = 1 … T-1, under the present weights."""
        scores: list[float] = await self._call(LeadRank.score.__name__, ids)
        return scores

    async def save(self, run: dict[str, Any], *, best: bool) -> None:
        """A checkpoint of this step."""
        await self._call(LeadRank.save.__name__, run, best)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._make(method, *args)
        except RuntimeError as error:  # what collectives raise where a rank is gone
            if self._others is None:
                raise
            await asyncio.wait({self._others}, timeout=NEWS_S)
            if self._others.done() and (why := self._others.exception()) is not None:
                raise why from error
            raise

    def _note(self, progress: Progress) -> Metrics:
        self.step, self.version = progress.step, progress.version
        return progress.metrics
