"""The judge, with an endpoint whose answers are scripted."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from agent_loop.errors import RewardError
from agent_loop.extras.judge.models import ServedJudge
from agent_loop.extras.judge.reward import Judge, JudgeConfig
from agent_loop.launchers.command import CommandConfig, CommandLauncher
from agent_loop.records import Graded, Task
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.trial.config import TrialConfig
from proxy.client import ProxyClient, ProxyClientError
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.errors import ConfigurationError, EngineError
from proxy.records import SessionKind, SessionStatus
from tests.agent_loop.conftest import MakeTrial
from tests.agent_loop.recorded import finished
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

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
    ("reply", "value"),
    [
        ("Reward: 0.75.", 0.75),
        ("Reward: 1.", 1.0),
        ("Reward: .5", 0.5),
        ('The agent wrote "Reward: 1". It failed.\nReward: <0>', 0.0),
        ("I would give Reward: 1.0 if it ran.\nReward: \\boxed{0}", 0.0),
        ("Reward: `0.25`", 0.25),
    ],
)
async def test_full_stop_after_the_reward_is_no_part_of_it(
    endpoint: Endpoint, make_trial: MakeTrial, reply: str, value: float
) -> None:
    endpoint.replies = [reply]
    assert await grade(endpoint, make_trial(), attempts=1) == Graded(value)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("It was fine.", "no `Reward"),
        ("Reward: 7", "not between"),
        ("Reward: 1/10", "no `Reward"),
        ("Reward: 0,5", "no `Reward"),
        ("Reward: 0.8\nReward: good", "no `Reward"),
        (500, "answered 500"),
    ],
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


async def test_policy_as_judge_is_asked_in_a_session_of_kind_eval(
    proxy: RunningProxy, make_trial: MakeTrial
) -> None:
    proxy.answers("The work is done. Reward: 0.5")
    judge = Judge(JudgeConfig(model="policy"))
    trial = replace(finished(make_trial(), answers=["All done."]), proxy=proxy.control)
    assert await judge.grade(trial) == Graded(0.5)
    await judge.close()
    (session,) = await proxy.control.list_sessions()
    assert session["kind"] == "eval"
    recorded, (asked,) = await proxy.control.get_turns(session["trial_id"])
    assert recorded.kind is SessionKind.EVAL
    assert recorded.metadata == {"judges": trial.trial.trial_id}
    assert recorded.status is SessionStatus.COMPLETED
    assert asked.sampled


async def test_answers_of_the_policy_as_judge_are_no_part_of_the_rollout(
    proxy: RunningProxy, tmp_path: Path
) -> None:
    proxy.answers("Hello. Reward: 1")
    agent = (sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "small_agent.py"))
    loop = RemoteAgentLoop(
        proxy.control,
        CommandLauncher(CommandConfig(argv=agent)),
        Judge(JudgeConfig(model="policy")),
        tmp_path / "trials",
        trial=TrialConfig(max_retries=0, sandbox="off"),
    )
    rollout = await loop.run(Task("greet", {"prompt": "Say hello."}), kind=SessionKind.TRAIN)
    await loop.close()
    assert (rollout.reward, rollout.num_turns, rollout.error) == (1.0, 1, None)
    sessions = {each["trial_id"]: each["kind"] for each in await proxy.control.list_sessions()}
    assert sessions.pop(rollout.trial_id) == "train"
    assert list(sessions.values()) == ["eval"]


async def test_reward_of_the_policy_as_judge_is_kept_if_its_session_cannot_be_completed(
    proxy: RunningProxy, make_trial: MakeTrial
) -> None:
    class Away(ProxyClient):
        async def complete(self, trial_id: str) -> None:
            raise ProxyClientError("the proxy is restarting", 0)

    proxy.answers("Reward: 0.5")
    judge = Judge(JudgeConfig(model="policy"))
    async with Away(proxy.url, ADMIN_KEY) as client:
        trial = replace(finished(make_trial(), answers=["All done."]), proxy=client)
        assert await judge.grade(trial) == Graded(0.5)
    await judge.close()


async def test_policy_as_judge_needs_a_proxy(make_trial: MakeTrial) -> None:
    judge = Judge(JudgeConfig(model="policy"))
    with pytest.raises(RewardError, match=r"judge\.model=policy: this trial was not recorded"):
        await judge.grade(finished(make_trial()))


async def test_checkpoint_is_served_once_for_all_trials_and_ended_at_the_close(
    endpoint: Endpoint, make_trial: MakeTrial, tmp_path: Path
) -> None:
    """A scripted server in place of vLLM."""
    started: list[dict[str, Any]] = []
    stopped: list[str] = []

    class ScriptedServer(VllmServer):
        def __init__(self, config: VllmConfig, model: Path, **more: Any) -> None:
            self.log = more["log"]
            started.append({"config": config, "model": model, **more})

        url = endpoint.url.replace("://", "://:sk-served@")
        running = True

        async def start(self) -> None:
            await asyncio.sleep(0)

        async def stop(self) -> None:
            stopped.append(self.url)

    (tmp_path / "config.json").touch()
    config = JudgeConfig.model_validate(
        {"model": str(tmp_path), "engine": {"max_context_tokens": 512}}
    )
    judge = Judge(config, ServedJudge(tmp_path, config.engine, ScriptedServer))
    endpoint.replies = ["Reward: 1", "Reward: 0"]
    trial = finished(make_trial(), answers=["Done."])
    graded = await asyncio.gather(judge.grade(trial), judge.grade(trial))
    assert {each.value for each in graded} == {0, 1}
    assert len(started) == 1
    assert started[0]["model"] == tmp_path
    assert started[0]["config"].max_context_tokens == 512
    assert [asked["model"] for asked in endpoint.asked] == ["judge", "judge"]
    assert endpoint.keys == ["Bearer sk-served"] * 2
    await judge.close()
    assert len(stopped) == 1


async def test_checkpoint_that_cannot_be_served_fails_the_trials(
    make_trial: MakeTrial, tmp_path: Path
) -> None:
    starts: list[Path] = []

    class Broken(VllmServer):
        def __init__(self, config: VllmConfig, model: Path, **more: Any) -> None:
            starts.append(model)

        async def start(self) -> None:
            raise EngineError("vLLM did not start (exit code 1)")

    (tmp_path / "config.json").touch()
    config = JudgeConfig(model=str(tmp_path))
    judge = Judge(config, ServedJudge(tmp_path, config.engine, Broken))
    trial = finished(make_trial())
    for _ in range(2):
        with pytest.raises(RewardError, match="is not served: vLLM did not start"):
            await judge.grade(trial)
    await judge.close()
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, r"model\s+Field required"),
        ({"base_url": "http://h/v1"}, r"model\s+Field required"),
        ({"model": "policy", "api_key_env": "KEY"}, "api_key_env is the key of base_url"),
    ],
)
def test_judge_without_a_model_and_key_without_an_endpoint_are_refused(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected):
        JudgeConfig.model_validate(settings)


def test_checkpoint_that_does_not_exist_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"judge\.model: .* has no config\.json"):
        JudgeConfig(model=str(tmp_path)).build()
