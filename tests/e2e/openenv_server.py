"""An environment on OpenEnv's own server: guess a number; `python openenv_server.py PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class GuessEnvironment(Environment):
    """Each hint costs 0.1, and the right number gives 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self._number = random.Random(seed).randrange(8)
        return Hint(text="a number from 0 to 7")

    def step(self, action: Guess, **_: Any) -> Hint:
        self._steps += 1
        if action.number < 0:
            raise RuntimeError("the environment fails")
        if action.number == self._number:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="higher" if action.number < self._number else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
