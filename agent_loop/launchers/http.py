"""The `http` launcher: agents that run in a service of their own.

The requests to the service, as JSON:

    POST {url}                 {trial_id, task, prompt, model, base_url, anthropic_base_url,
                               api_key, seed, timeout_s, callback_url?}  → {"status": …}
    GET {url}/{trial_id}?wait_s=…
                             →  {"status": "running" | "done" | "failed", "reward"?, "error"?,
                               "logs"?}; the service may hold the answer back for `wait_s`
    DELETE {url}/{trial_id}    ends the agent; the service answers once the agent has ended

The answer to POST may already hold the final status. With `callback` the service is not polled; it
POSTs the final object to `callback_url`. Invariant: at the deadline, on cancellation and after an
error the service is asked to end the agent, and `run` waits for the answer before it returns or
raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from pydantic import Field
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from agent_loop.errors import LaunchError
from agent_loop.launchers.protocol import OVERHEAD_S, LauncherConfig
from agent_loop.launchers.workspace import make_workspace
from agent_loop.model_api import BearerKey, json_headers
from agent_loop.processes.host import PROCESS, ProcessConfig
from agent_loop.records import AgentEnd, AgentResult, Trial
from agent_loop.reward_values import RewardKey, graded
from proxy.errors import RequestError
from proxy.http.server import app_runner, read_body
from proxy.machine.direct_hosts import proxy_for
from proxy.machine.port import BACKLOG, http_url
from proxy.settings.reaching import ListeningAddress, Patience, PublicUrl

BODY_BYTES = 16 << 20
"""Maximum size of a callback's body; a larger one is refused with 413."""


class CallbackConfig(PublicUrl, ListeningAddress):
    """Example: CallbackConfig(public_url="http://10.0.0.7:8900", port=8900)"""


class HttpConfig(BearerKey, RewardKey, Patience, LauncherConfig):
    """Example: HttpConfig(url="http://agents.internal/runs")"""

    url: str
    """URL to which new runs are POSTed."""
    callback: CallbackConfig | None = None
    """Where the service reports the end of a run; None: the service is polled."""
    poll_s: float = Field(10.0, gt=0)
    """Seconds that the service may hold back an answer; also the minimum time between two
    requests."""
    patience_s: float = Field(30.0, ge=0)

    @property
    def process_keys(self) -> frozenset[str]:
        return frozenset({"log_bytes"})

    def build(self, process: ProcessConfig = PROCESS) -> HttpLauncher:
        return HttpLauncher(self, process)


class HttpLauncher:
    """Submits each trial to the service and waits for its end."""

    overhead_s = OVERHEAD_S

    def __init__(self, settings: HttpConfig, process: ProcessConfig = PROCESS) -> None:
        """Raises ConfigurationError: the token's variable is not set."""
        self._settings = settings
        self._process = process
        self._http: aiohttp.ClientSession | None = None
        self._headers = json_headers(
            "http.api_key_env", settings.api_key_env, "the agent service's token"
        )
        self._callbacks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Secret of a trial's callback URL → its final status."""
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def run(self, trial: Trial) -> AgentResult:
        await make_workspace(trial, None)
        secret = secrets.token_urlsafe(24)
        self._callbacks[secret] = asyncio.get_running_loop().create_future()
        started = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(started + trial.timeout_s):
                status = await self._submit(trial, secret)
                final = await self._final(trial.trial_id, status, self._callbacks[secret])
        except TimeoutError:
            wall_s = asyncio.get_running_loop().time() - started
            await self._end(trial.trial_id)
            error = f"ended at its deadline, after {wall_s:.1f} s"
            return AgentResult(AgentEnd.TIMED_OUT, error, wall_s)
        except asyncio.CancelledError:
            await self._end(trial.trial_id)
            raise
        except LaunchError:
            with contextlib.suppress(LaunchError):  # the first error is the reason
                await self._end(trial.trial_id)
            raise
        finally:
            del self._callbacks[secret]
        return self._result(trial, final, asyncio.get_running_loop().time() - started)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._runner is not None:
            await self._runner.cleanup()
        self._http = self._runner = None

    async def _submit(self, trial: Trial, secret: str) -> dict[str, Any]:
        body = {
            "trial_id": trial.trial_id,
            "task": trial.agent_data,
            "prompt": trial.task.prompt,
            "model": trial.model,
            "base_url": trial.base_url,
            "anthropic_base_url": trial.base_url.removesuffix("/v1"),
            "api_key": trial.api_key,
            "seed": trial.seed,
            "timeout_s": trial.timeout_s,
        }
        if self._settings.callback is not None:
            body["callback_url"] = f"{await self._callback_url()}/{secret}"
        return await self._call("POST", self._settings.url, body)

    async def _final(
        self, trial_id: str, status: dict[str, Any], callback: asyncio.Future[dict[str, Any]]
    ) -> dict[str, Any]:
        while status.get("status") not in ("done", "failed"):
            if self._settings.callback is not None:
                status = await callback
                if status.get("status") not in ("done", "failed"):
                    raise LaunchError(
                        f"agent service: the callback's status must be done or failed: {status!r}"
                    )
            else:
                status = await self._poll(trial_id)
        return status

    async def _poll(self, trial_id: str) -> dict[str, Any]:
        """Returns one answer; if the answer is `running`, only after `poll_s`."""
        poll_s = self._settings.poll_s
        clock = asyncio.get_running_loop().time
        began = clock()
        url = f"{self._settings.url}/{trial_id}?wait_s={poll_s:g}"
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(_Unreachable),
            stop=stop_after_delay(self._settings.patience_s),
            wait=wait_exponential(multiplier=0.1, max=5.0),
            reraise=True,
        ):
            with attempt:
                status = await self._call("GET", url)
        if status.get("status") not in ("done", "failed"):
            await asyncio.sleep(began + poll_s - clock())
        return status

    async def _end(self, trial_id: str) -> None:
        """Ends the agent, even if this call is cancelled.

        Raises:
            LaunchError: the service did not confirm that the agent has ended.
        """
        ending = asyncio.ensure_future(self._call("DELETE", f"{self._settings.url}/{trial_id}"))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    async def _call(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=self._headers, proxy=proxy_for(self._settings.url)
            )
        timeout = aiohttp.ClientTimeout(total=self._settings.poll_s + 30.0)
        data = None if body is None else orjson.dumps(body, default=str)
        try:
            async with self._http.request(method, url, data=data, timeout=timeout) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Unreachable(f"agent service: {method} {url}: {error!r}") from error
        if response.status in (502, 503, 504):
            raise _Unreachable(f"agent service: {method} {url}: {response.status}")
        if response.status >= 400 and not (method == "DELETE" and response.status in (404, 410)):
            said = raw[:200].decode(errors="replace")
            raise LaunchError(f"agent service: {method} {url}: {response.status} {said}")
        if method == "DELETE":
            return {}
        return _object(raw, f"{method} {url}")

    def _result(self, trial: Trial, final: Mapping[str, Any], wall_s: float) -> AgentResult:
        logs = str(final.get("logs", "")).encode()[-self._process.log_bytes :]
        (trial.directory / "agent.log").write_bytes(logs)
        reward = graded(final.get("reward"), self._settings.key, "the agent service's reward")
        failed = final["status"] == "failed"
        return AgentResult(
            AgentEnd.CRASHED if failed else AgentEnd.EXITED,
            error=str(final.get("error", "the agent service says failed")) if failed else None,
            wall_s=wall_s,
            reward=reward.value,
            reward_parts=reward.parts,
        )

    async def _callback_url(self) -> str:
        settings = self._settings.callback
        assert settings is not None
        async with self._starting:
            if self._runner is None:
                app = web.Application(client_max_size=BODY_BYTES)
                app.router.add_post("/{secret}", self._called_back)
                runner = app_runner(app)
                await runner.setup()
                await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
                self._runner = runner
        if settings.public_url is not None:
            return settings.public_url.rstrip("/")
        return http_url(settings.host, self._runner.addresses[0][1])

    async def _called_back(self, request: web.Request) -> web.Response:
        given = request.match_info["secret"]
        for secret, waiting in self._callbacks.items():
            if hmac.compare_digest(secret.encode(), given.encode()):
                try:
                    result = _object(await read_body(request), "callback")
                except (RequestError, LaunchError) as error:
                    return web.json_response({"error": str(error)}, status=400)
                if not waiting.done():
                    waiting.set_result(result)
                return web.json_response({})
        return web.json_response({"error": "no such run, or it has ended"}, status=404)


class _Unreachable(LaunchError):
    """The service did not answer. The request is repeated within `patience_s` if that is safe."""


def _object(raw: bytes, origin: str) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise LaunchError(f"agent service: {origin}: not a JSON object: {raw[:80]!r}")
    return value
