"""An environment of the package `verifiers`: the shorter the answer, the better.

Any model can learn it in a few steps. `agentic-train --config examples/environments/verifiers.yaml`
trains on it; `python -m benchmarks.install verifiers` installs verifiers.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

LONG = 150
"""Characters of an answer from which on it has no reward."""
THINGS = ("apples", "books", "candles", "drums", "eggs", "forks", "gloves", "hats")


class ShortTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        return max(0.0, 1 - len(trace.last_reply) / LONG)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ShortTaskset(vf.Taskset[ShortTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ShortTask]:
        for count in range(1, 10):
            for thing in THINGS:
                prompt = f"What does this order cost?\n{thing}: {count}"
                yield ShortTask(vf.TaskData(prompt=prompt), self.config.task)


__all__ = ["ShortTaskset"]
