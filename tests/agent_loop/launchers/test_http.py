"""The http launcher against a service that polls, calls back, fails, vanishes and hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.http import CallbackSettings, HttpLauncher, HttpSettings
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Trial
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial


class Service:
    """Answers each GET with the next of `statuses`, the last one for ever; a number is a status
    code."""

    def __init__(self) -> None:
        self.statuses: list[dict[str, Any] | int] = []
        self.submitted: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.polls = 0
        self.polled = asyncio.Event()
        self.url = ""

    async def submit(self, request: web.Request) -> web.Response:
        self.submitted.append(await request.json())
        if not self.statuses:
            return web.json_response({"error": "no room"}, status=400)
        return web.json_response({"status": "running"}, status=202)

    async def status(self, request: web.Request) -> web.Response:
        self.polls += 1
        self.polled.set()
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(status, int):
            return web.Response(status=status)
        return web.json_response(status)

    async def delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["id"])
        return web.Response(status=204)


RUNNING = {"status": "running"}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    app = web.Application()
    app.router.add_post("/runs", made.submit)
    app.router.add_get("/runs/{id}", made.status)
    app.router.add_delete("/runs/{id}", made.delete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/runs"
    yield made
    await runner.cleanup()


async def run(service: Service, trial: Trial, **settings: Any) -> AgentResult:
    launcher = HttpLauncher(HttpSettings(**{"url": service.url, "poll_s": 0.01, **settings}))
    try:
        return await launcher.run(trial)
    finally:
        await launcher.close()


async def test_run_is_submitted_polled_and_its_reward_and_logs_kept(
    service: Service, make_trial: MakeTrial
) -> None:
    done = {"status": "done", "reward": {"reward": 0.5, "speed": 2}, "logs": "I ran."}
    service.statuses = [RUNNING, 503, RUNNING, done]
    trial = make_trial()
    result = await run(service, trial)
    assert (result.end, result.reward) == (AgentEnd.EXITED, 0.5)
    assert result.reward_parts == {"reward": 0.5, "speed": 2}
    assert (trial.directory / "agent.log").read_text() == "I ran."
    assert service.polls == 4
    (submitted,) = service.submitted
    assert submitted["base_url"] == trial.base_url
    assert submitted["anthropic_base_url"] == "http://127.0.0.1:9"
    assert submitted["api_key"] == trial.api_key
    assert submitted["task"] == {"prompt": "do it"}
    assert service.deleted == []


async def test_failed_run_is_a_crash_with_its_error(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [{"status": "failed", "error": "out of cheese"}]
    result = await run(service, make_trial())
    assert (result.end, result.error) == (AgentEnd.CRASHED, "out of cheese")


async def test_agent_is_told_to_end_at_its_deadline(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [RUNNING]
    result = await run(service, make_trial(timeout_s=0.1))
    assert result.end is AgentEnd.TIMED_OUT
    assert service.deleted == ["t-1"]


async def test_cancelling_tells_the_agent_to_end(service: Service, make_trial: MakeTrial) -> None:
    service.statuses = [RUNNING]
    running = asyncio.ensure_future(run(service, make_trial(timeout_s=600)))
    await service.polled.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert service.deleted == ["t-1"]


async def test_refused_submission_is_our_failure_with_the_services_words(
    service: Service, make_trial: MakeTrial
) -> None:
    with pytest.raises(LaunchError, match=r"400 .*no room"):
        await run(service, make_trial())


async def test_service_that_stays_away_is_our_failure(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [503]
    with pytest.raises(LaunchError, match="503"):
        await run(service, make_trial(), patience_s=0.2)


async def test_reward_that_is_no_number_is_refused(service: Service, make_trial: MakeTrial) -> None:
    service.statuses = [{"status": "done", "reward": "good"}]
    with pytest.raises(RewardError, match="'good' is not a number"):
        await run(service, make_trial())


async def test_callback_ends_the_run_and_only_its_secret_is_heard(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [RUNNING]
    running = asyncio.ensure_future(run(service, make_trial(), callback=CallbackSettings()))
    async with aiohttp.ClientSession() as http, asyncio.timeout(10):
        while not service.submitted:  # noqa: ASYNC110 (the service has no event for it)
            await asyncio.sleep(0.01)
        url = service.submitted[0]["callback_url"]
        guess = url.rsplit("/", 1)[0] + "/guess"
        final = {"status": "done", "reward": 1}
        async with http.post(guess, json={"status": "done", "reward": 9}) as response:
            assert response.status == 404
        async with http.post(url, json=final) as response:
            assert response.status == 200
        result = await running
    assert result.reward == 1.0
    assert service.polls == 0


def test_missing_token_is_told_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="NO_SUCH_TOKEN"):
        HttpLauncher(HttpSettings(url="http://x/runs", api_key_env="NO_SUCH_TOKEN"))
