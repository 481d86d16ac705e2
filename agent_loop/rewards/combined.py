"""Combines several reward sources in a weighted sum; each part is kept under its source's name.

Invariant: if one source gives no reward, the sum gives none, because a missing part is not 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from agent_loop.errors import RewardError
from agent_loop.processes.host import StartsEarly
from agent_loop.records import FinishedTrial, Graded
from agent_loop.rewards.protocol import RewardSource


@dataclass(frozen=True, slots=True)
class Weighted:
    """A source and its weight in the sum."""

    source: RewardSource
    weight: float = 1.0


class CombinedReward:
    """Example: CombinedReward({"tests": Weighted(verifier), "style": Weighted(judge, 0.2)})"""

    def __init__(self, sources: Mapping[str, Weighted]) -> None:
        self._sources = sources

    def start(self) -> None:
        for weighted in self._sources.values():
            if isinstance(weighted.source, StartsEarly):
                weighted.source.start()

    async def grade(self, finished: FinishedTrial) -> Graded:
        async with asyncio.TaskGroup() as grading:
            tasks = {
                name: grading.create_task(_grade(weighted.source, finished))
                for name, weighted in self._sources.items()
            }
        results = {name: task.result() for name, task in tasks.items()}
        parts: dict[str, float] = {}
        value: float | None = 0.0
        for name, result in results.items():
            if isinstance(result, RewardError):
                raise result
            parts |= {f"{name}.{part}": number for part, number in result.parts.items()}
            if result.value is None:
                value = None
                continue
            parts[name] = result.value
            if value is not None:
                value += self._sources[name].weight * result.value
        return Graded(value, parts)

    async def close(self) -> None:
        for weighted in self._sources.values():
            await weighted.source.close()


async def _grade(source: RewardSource, finished: FinishedTrial) -> Graded | RewardError:
    """Returns a RewardError instead of raising it, because a task group would wrap it."""
    try:
        return await source.grade(finished)
    except RewardError as error:
        return error
