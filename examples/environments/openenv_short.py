"""An environment on OpenEnv's own server: two answers, each the better the shorter it is.

`.cache/openenv/bin/python examples/environments/openenv_short.py` serves it at 127.0.0.1:8020;
`python -m benchmarks.install openenv` installs OpenEnv.
"""

from __future__ import annotations

import random
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

PORT = 8020
LONG = 150
"""Characters of an answer from which on it has no reward."""
THINGS = ("apples", "books", "candles", "drums", "eggs", "forks", "gloves", "hats")


class Say(Action):
    text: str


class Order(Observation):
    text: str = ""


class ShortAnswers(Environment):
    """Two orders; the reward of each answer is at most 0.5."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random()
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Order:
        self._random, self._steps = random.Random(seed), 0
        return Order(text=self._order())

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Order:
        self._steps += 1
        reward = max(0.0, 1 - len(action.text) / LONG) / 2
        return Order(text=self._order(), reward=reward, done=self._steps == 2)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)

    def _order(self) -> str:
        thing, count = self._random.choice(THINGS), self._random.randint(1, 9)
        return f"What does this order cost?\n{thing}: {count}"


if __name__ == "__main__":
    app = create_fastapi_app(ShortAnswers, Say, Order, max_concurrent_envs=16)
    uvicorn.run(app, host="127.0.0.1", port=PORT)
