"""An environment with several turns: it answers each guess with "higher" or "lower"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessTask]:
        number = 0
        while True:
            number = (number + 5) % 8
            yield GuessTask(GuessData(name=f"guess-{number}", number=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        found = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess a number from 0 to 7.")
            for _ in range(4):
                if segment.terminated:
                    break
                guess = int(segment.last_reply)
                found = guess == task.data.number
                if found:
                    break
                hint = "higher" if guess < task.data.number else "lower"
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("found", float(found))


__all__ = ["GuessEnv", "GuessTaskset"]
