"""Several reward sources as one: their weighted sum, each part kept under its source's name.

Invariant: where one of them has no opinion the sum has none: a part that is missing is not 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from agent_loop.errors import RewardError
from agent_loop.rewards.protocol import Finished, Graded, RewardSource


@dataclass(frozen=True, slots=True)
class Weighted:
    source: RewardSource
    weight: float = 1.0


class CombinedReward:
    """Example: CombinedReward({"tests": Weighted(verifier), "style": Weighted(judge, 0.2)})"""

    def __init__(self, sources: Mapping[str, Weighted]) -> None:
        self._sources = sources

    async def grade(self, finished: Finished) -> Graded:
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


async def _grade(source: RewardSource, finished: Finished) -> Graded | RewardError:
    """The error as a value: a task group would wrap it."""
    try:
        return await source.grade(finished)
    except RewardError as error:
        return error
