"""Reward from a language model behind an OpenAI-compatible endpoint.

The judge is asked to end its answer with `Reward: <number>`. Invariant: an answer without a
number within the bounds, or a judge that cannot be reached, is a `RewardError`, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import aiohttp
import orjson
from pydantic import Field
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from agent_loop.api_key import json_headers
from agent_loop.errors import RewardError
from agent_loop.records import FinishedTrial, Graded
from agent_loop.reward_values import number
from agent_loop.rewards.grader import answers
from agent_loop.rewards.protocol import RewardConfig
from proxy.records import Turn

PROMPT = """An agent was given this task:

{task}

Its messages, in order:

{answers}

{criteria}
End with one line of the form `Reward: <number>`, from {low:g} (failed) to {high:g} (perfect)."""

_REWARD = re.compile(r"reward\s*[:=]\s*\**\s*([-+]?[\d.]+(?:e[-+]?\d+)?)", re.IGNORECASE)


class JudgeConfig(RewardConfig):
    """Example: JudgeConfig(base_url="https://…/v1", model="judge", api_key_env="JUDGE_KEY")"""

    base_url: str
    """URL of an OpenAI-compatible endpoint, with `/v1`."""
    model: str
    """Name of the model at this endpoint."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the endpoint's API key."""
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
    timeout_s: float = Field(120.0, gt=0)
    """Seconds for one answer."""
    attempts: int = Field(3, ge=1)
    """Maximum number of requests per trial; a request is repeated if the judge is busy or does not
    answer in the requested form."""

    def build(self) -> Judge:
        return Judge(self)


class Judge:
    """Asks the model once per trial, and again if the answer cannot be used."""

    def __init__(self, settings: JudgeConfig) -> None:
        """Raises ConfigurationError: the key's variable is not set."""
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._headers = json_headers(
            "judge.api_key_env", settings.api_key_env, "the judge's API key"
        )

    async def grade(self, finished: FinishedTrial) -> Graded:
        settings = self._settings
        prompt = PROMPT.format(
            task=finished.trial.task.prompt,
            answers=transcript(finished.turns)[-settings.max_answers_chars :],
            criteria=settings.criteria,
            low=settings.low,
            high=settings.high,
        )
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(RewardError),
            stop=stop_after_attempt(settings.attempts),
            wait=wait_exponential(multiplier=0.5, max=10.0),
            reraise=True,
        ):
            with attempt:
                value = self._parse(await self._ask(prompt))
        return Graded(value)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _ask(self, prompt: str) -> str:
        settings = self._settings
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers)
        body = {
            "model": settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": settings.max_tokens,
            "temperature": 0,
        }
        url = f"{settings.base_url.rstrip('/')}/chat/completions"
        timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
        try:
            async with self._http.post(url, data=orjson.dumps(body), timeout=timeout) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RewardError(f"judge: {url} answered {response.status}: {raw[:200]!r}")
                content = orjson.loads(raw)["choices"][0]["message"]["content"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RewardError(f"judge: {url} did not answer: {error!r}") from error
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise RewardError(f"judge: {url} returned no chat completion: {error!r}") from error
        return str(content)

    def _parse(self, answer: str) -> float:
        found = _REWARD.findall(answer)
        if not found:
            raise RewardError(f"judge: no `Reward: <number>` in its answer: …{answer[-80:]!r}")
        value = number(found[-1], "judge")
        low, high = self._settings.low, self._settings.high
        if not low <= value <= high:
            raise RewardError(f"judge: reward {value} is not between {low} and {high}")
        return value


def transcript(turns: Sequence[Turn]) -> str:
    """The agent's messages, with its tool calls, as JSON lines."""
    return "\n".join(orjson.dumps(message).decode() for message in answers(turns))
