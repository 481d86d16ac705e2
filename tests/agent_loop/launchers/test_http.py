"""The http launcher with a service that is polled, calls back, fails, disappears and hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agent_loop.errors import LaunchError, RewardError
from agent_loop.launchers.http import CallbackConfig, HttpConfig, HttpLauncher
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Trial
from proxy.errors import ConfigurationError
from tests.agent_loop.conftest import MakeTrial


class Service:
    """Answers each GET with the next of `statuses`, and repeats the last one. A number is an HTTP
    status code."""

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


async def run(
    service: Service, trial: Trial, process: ProcessConfig = PROCESS, **settings: Any
) -> AgentResult:
    config = HttpConfig(**{"url": service.url, "poll_s": 0.01, **settings})
    launcher = HttpLauncher(config, process)
    try:
        return await launcher.run(trial)
    finally:
        await launcher.close()


async def test_run_is_submitted_and_polled_and_its_reward_and_logs_are_kept(
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


async def test_end_of_long_logs_is_kept(service: Service, make_trial: MakeTrial) -> None:
    service.statuses = [{"status": "done", "logs": "x" * 5000 + "the end"}]
    trial = make_trial()
    await run(service, trial, ProcessConfig(log_bytes=1024))
    log = (trial.directory / "agent.log").read_text()
    assert (len(log), log[-7:]) == (1024, "the end")


async def test_failed_run_is_a_crash_with_its_error(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [{"status": "failed", "error": "out of cheese"}]
    result = await run(service, make_trial())
    assert (result.end, result.error) == (AgentEnd.CRASHED, "out of cheese")


async def test_agent_is_ended_through_the_service_at_its_deadline(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [RUNNING]
    result = await run(service, make_trial(timeout_s=0.1))
    assert result.end is AgentEnd.TIMED_OUT
    assert service.deleted == ["t-1"]


async def test_cancelling_ends_the_agent_through_the_service(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [RUNNING]
    running = asyncio.ensure_future(run(service, make_trial(timeout_s=600)))
    await service.polled.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert service.deleted == ["t-1"]


async def test_refused_submission_is_a_launch_error_with_the_services_message(
    service: Service, make_trial: MakeTrial
) -> None:
    with pytest.raises(LaunchError, match=r"400 .*no room"):
        await run(service, make_trial())


async def test_service_that_stays_unreachable_is_a_launch_error(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [503]
    with pytest.raises(LaunchError, match="503"):
        await run(service, make_trial(), patience_s=0.2)


async def test_reward_that_is_not_a_number_is_refused(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [{"status": "done", "reward": "good"}]
    with pytest.raises(RewardError, match="'good' is not a number"):
        await run(service, make_trial())


async def test_callback_ends_the_run_only_with_the_runs_secret(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [RUNNING]
    running = asyncio.ensure_future(
        run(service, make_trial(), callback=CallbackConfig(host="127.0.0.2"))
    )
    async with aiohttp.ClientSession() as http, asyncio.timeout(10):
        while not service.submitted:  # noqa: ASYNC110 (the service has no event for it)
            await asyncio.sleep(0.01)
        url = service.submitted[0]["callback_url"]
        assert url.startswith("http://127.0.0.2:")
        guess = url.rsplit("/", 1)[0] + "/guess"
        final = {"status": "done", "reward": 1}
        async with http.post(guess, json={"status": "done", "reward": 9}) as response:
            assert response.status == 404
        async with http.post(url, json=final) as response:
            assert response.status == 200
        result = await running
    assert result.reward == 1.0
    assert service.polls == 0


def test_missing_token_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match="NO_SUCH_TOKEN"):
        HttpLauncher(HttpConfig(url="http://x/runs", api_key_env="NO_SUCH_TOKEN"))


async def test_service_reaches_the_callback_by_its_public_url(
    service: Service, make_trial: MakeTrial
) -> None:
    service.statuses = [RUNNING]
    callback = CallbackConfig(public_url="http://agents.internal:8900/")
    running = asyncio.ensure_future(run(service, make_trial(), callback=callback))
    async with asyncio.timeout(10):
        while not service.submitted:  # noqa: ASYNC110 (the service has no event for it)
            await asyncio.sleep(0.01)
    url = service.submitted[0]["callback_url"]
    assert url.startswith("http://agents.internal:8900/")
    assert len(url.rpartition("/")[2]) > 20
    running.cancel()
    await asyncio.wait([running])


async def test_agent_of_a_run_that_cannot_be_followed_any_more_is_ended(
    service: Service, make_trial: MakeTrial
) -> None:
    """Otherwise it would go on beside the agent of the trial's retry."""
    service.statuses = [RUNNING, 500]
    with pytest.raises(LaunchError, match="500"):
        await run(service, make_trial())
    assert service.deleted == ["t-1"]
