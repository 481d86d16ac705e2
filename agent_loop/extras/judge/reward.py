"""Reward from a language model: an endpoint, a checkpoint that the run serves, or the policy.

The judge is asked to end its answer with `Reward: <number>`. Invariant: an answer without a
number within the bounds, or a judge that cannot be reached, is a `RewardError`, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import aiohttp
from pydantic import Field, model_validator
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from agent_loop.errors import ChatError, RewardError
from agent_loop.extras.judge.models import (
    EndpointJudge,
    JudgeAccess,
    JudgeModel,
    PolicyJudge,
    ServedJudge,
)
from agent_loop.model_api import BearerKey, chat_completion
from agent_loop.records import FinishedTrial, Graded
from agent_loop.reward_values import number
from agent_loop.rewards.protocol import JudgeSection
from proxy.engines.vllm_server import VllmConfig
from proxy.machine.direct_hosts import proxy_for
from proxy.records import Turn

POLICY = "policy"
"""The model of a judge that is the policy in training itself."""
MAX_WAIT_S = 10.0
"""Longest wait before the judge is asked again."""
PROMPT = """An agent was given this task:

{task}

Its messages, in order:

{answers}

{criteria}
End with one line of the form `Reward: <number>`, from {low:g} (failed) to {high:g} (perfect)."""

_REWARD = re.compile(r"reward\s*\**\s*[:=]", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?:[\s*_`<$(\[]|\\boxed\{)*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)(?!\d|,\d|\s*[/%])",
    re.IGNORECASE,
)
"""A number, also in the marks that models put around it; not a part of another one."""


class JudgeConfig(BearerKey, JudgeSection):
    """Example: JudgeConfig(base_url="https://…/v1", model="judge", api_key_env="JUDGE_KEY")"""

    model: str = Field(min_length=1)
    """Name of the model at `base_url`. Without `base_url`: `policy`, the policy itself, in a
    session of kind `eval`, which is never trained; or the folder of a checkpoint that the run
    serves with a vLLM of its own, from the first trial on."""
    base_url: str | None = None
    """URL of an OpenAI-compatible endpoint, with `/v1`."""
    engine: VllmConfig = VllmConfig()
    """The vLLM server of a checkpoint, on the trainer's machine; give it a GPU by `env`."""
    criteria: str = "Judge whether the task was done, and done well."
    """What the judge is asked to judge."""
    low: float = 0.0
    """The smallest reward, for a failure."""
    high: float = 1.0
    """The largest reward, for perfect work."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens of the judge's answer."""
    max_answers_chars: int = Field(40_000, ge=100)
    """Maximum number of characters of the agent's messages that the judge is shown; of a longer
    text, it is shown the end."""
    attempts: int = Field(3, ge=1)
    """Maximum number of requests per trial; a request is repeated if the judge is busy or does not
    answer in the requested form."""

    @model_validator(mode="after")
    def _key_has_an_endpoint(self) -> Self:
        if self.api_key_env is not None and self.base_url is None:
            raise ValueError("api_key_env is the key of base_url; remove it")
        return self

    @property
    def is_policy(self) -> bool:
        return self.base_url is None and self.model == POLICY

    @property
    def served(self) -> VllmConfig | None:
        return self.engine if self.base_url is None and not self.is_policy else None

    def build(self) -> Judge:
        return Judge(self)

    def build_model(self) -> JudgeModel:
        """Raises ConfigurationError: the key's variable is not set, or there is no checkpoint."""
        if self.base_url is not None:
            return EndpointJudge(self.base_url, self.model, self.api_key_env)
        if not self.is_policy:
            return ServedJudge(Path(self.model), self.engine)
        return PolicyJudge(ttl_s=(self.timeout_s + MAX_WAIT_S) * self.attempts)


class Judge:
    """Asks the model once per trial, and again if the answer cannot be used."""

    def __init__(self, settings: JudgeConfig, model: JudgeModel | None = None) -> None:
        """`model` replaces the model of the settings.

        Raises:
            ConfigurationError: as `JudgeConfig.build_model`.
        """
        self._settings = settings
        self._model = model or settings.build_model()
        self._http: aiohttp.ClientSession | None = None

    async def grade(self, finished: FinishedTrial) -> Graded:
        settings = self._settings
        prompt = PROMPT.format(
            task=finished.trial.task.prompt,
            answers=transcript(finished.turns)[-settings.max_answers_chars :],
            criteria=settings.criteria,
            low=settings.low,
            high=settings.high,
        )
        async with self._model.access(finished) as access:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(RewardError),
                stop=stop_after_attempt(settings.attempts),
                wait=wait_exponential(multiplier=0.5, max=MAX_WAIT_S),
                reraise=True,
            ):
                with attempt:
                    value = self._parse(await self._ask(access, prompt))
        return Graded(value)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None
        await self._model.close()

    async def _ask(self, access: JudgeAccess, prompt: str) -> str:
        settings = self._settings
        if self._http is None:
            self._http = aiohttp.ClientSession(proxy=proxy_for(access.base_url))
        body = {
            "model": access.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": settings.max_tokens,
            "temperature": 0,
        }
        try:
            return await chat_completion(
                self._http, access.base_url, access.headers, body, settings.timeout_s
            )
        except ChatError as error:
            raise RewardError(f"judge: {error}") from error

    def _parse(self, answer: str) -> float:
        *_, last = [None, *_REWARD.finditer(answer)]
        found = None if last is None else _NUMBER.match(answer, last.end())
        if found is None:
            raise RewardError(f"judge: no `Reward: <number>` in its answer: …{answer[-80:]!r}")
        value = number(found[1], "judge")
        low, high = self._settings.low, self._settings.high
        if not low <= value <= high:
            raise RewardError(f"judge: reward {value} is not between {low} and {high}")
        return value


def transcript(turns: Sequence[Turn]) -> str:
    """The agent's messages, with its tool calls, as JSON lines."""
    return "\n".join(turn.answer.decode() for turn in turns if turn.sampled and turn.answer)
