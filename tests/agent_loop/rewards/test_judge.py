"""The judge, with an endpoint whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agent_loop.errors import RewardError
from agent_loop.records import Graded
from agent_loop.rewards.judge import Judge, JudgeConfig
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished

SILENCE = "silence"


class Endpoint:
    """Answers with the next of `replies`. A number is an HTTP status code; for `SILENCE` it never
    answers."""

    def __init__(self) -> None:
        self.replies: list[str | int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        reply = self.replies.pop(0)
        if reply == SILENCE:
            await asyncio.Event().wait()
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "busy"}}, status=reply)
        return web.json_response({"choices": [{"message": {"content": reply}}]})


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", made.answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield made
    await runner.cleanup()


async def grade(endpoint: Endpoint, trial: Any, **settings: Any) -> Graded:
    judge = Judge(JudgeConfig(base_url=endpoint.url, model="judge", **settings))
    try:
        return await judge.grade(finished(trial, answers=["I did it.", "All done."]))
    finally:
        await judge.close()


async def test_judge_sees_the_task_and_the_answers_and_its_last_number_counts(
    endpoint: Endpoint, make_trial: MakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-judge")
    endpoint.replies = ["A Reward: 0.1 would be harsh.\n\n**Reward: 0.75**"]
    assert await grade(endpoint, make_trial(), api_key_env="JUDGE_KEY") == Graded(0.75)
    prompt = endpoint.asked[0]["messages"][0]["content"]
    assert "do it" in prompt
    assert "All done." in prompt
    assert endpoint.keys == ["Bearer sk-judge"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [("It was fine.", "no `Reward"), ("Reward: 7", "not between"), (500, "answered 500")],
)
async def test_unusable_judgement_is_a_reward_error_instead_of_reward_0(
    endpoint: Endpoint, make_trial: MakeTrial, reply: str | int, expected: str
) -> None:
    endpoint.replies = [reply]
    with pytest.raises(RewardError, match=expected):
        await grade(endpoint, make_trial(), attempts=1)


async def test_busy_judge_is_asked_again(endpoint: Endpoint, make_trial: MakeTrial) -> None:
    endpoint.replies = [429, "Reward: 1"]
    assert await grade(endpoint, make_trial(), attempts=2) == Graded(1.0)


def test_missing_key_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="NO_SUCH_KEY"):
        Judge(JudgeConfig(base_url="http://x/v1", model="m", api_key_env="NO_SUCH_KEY"))


async def test_judge_is_asked_by_the_criteria_about_the_end_of_a_long_conversation(
    endpoint: Endpoint, make_trial: MakeTrial
) -> None:
    endpoint.replies = ["Reward: -1"]
    settings = JudgeConfig(
        base_url=endpoint.url,
        model="judge",
        criteria="Judge only the style.",
        low=-2.0,
        high=2.0,
        max_tokens=77,
        max_answers_chars=100,
    )
    judge = Judge(settings)
    graded = await judge.grade(finished(make_trial(), answers=["first " * 50, "the last words"]))
    await judge.close()
    assert graded == Graded(-1.0)
    prompt = endpoint.asked[0]["messages"][0]["content"]
    assert "Judge only the style." in prompt
    assert "from -2 (failed) to 2 (perfect)" in prompt
    assert "the last words" in prompt
    assert prompt.count("first") < 20
    assert endpoint.asked[0]["max_tokens"] == 77


async def test_judge_that_does_not_answer_in_time_is_a_failure(
    endpoint: Endpoint, make_trial: MakeTrial
) -> None:
    endpoint.replies = [SILENCE]
    with pytest.raises(RewardError, match="judge"):
        await grade(endpoint, make_trial(), timeout_s=0.2, attempts=1)
