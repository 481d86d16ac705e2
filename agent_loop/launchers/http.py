"""The `http` launcher: agents that run in a service of somebody else's.

What the service is asked, as JSON:

    POST {url}                 {trial_id, task, prompt, model, base_url, anthropic_base_url,
                               api_key, seed, timeout_s, callback_url?}  → {"status": …}
    GET {url}/{trial_id}?wait_s=…
                             →  {"status": "running" | "done" | "failed", "reward"?, "error"?,
                               "logs"?}; may be held back until it ends, at most `wait_s`
    DELETE {url}/{trial_id}    end the agent; answered once it has ended

A service that answers POST with a final status is done at once. With `callback` it is not polled:
it POSTs the final object to `callback_url`. Invariant: at its deadline, and on cancellation, the
agent is told to end, and the answer is waited for, before `run` returns or raises.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from agent_loop.errors import LaunchError
from agent_loop.launchers.environment import make_workspace, prompt_of
from agent_loop.launchers.protocol import AgentEnd, AgentResult, Trial
from agent_loop.rewards.protocol import graded
from proxy.errors import ConfigurationError

BODY_BYTES = 16 << 20
"""Of a callback; more is refused with 413."""


class CallbackSettings(BaseModel):
    """Example: CallbackSettings(public_url="http://10.0.0.7:8900", port=8900)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0: a free one."""
    public_url: str | None = None
    """How the service reaches us; None: host and port as they are."""


class HttpSettings(BaseModel):
    """Example: HttpSettings(url="http://agents.internal/runs")"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    api_key_env: str | None = None
    """Name of the environment variable with the service's bearer token."""
    callback: CallbackSettings | None = None
    """None: it is polled."""
    poll_s: float = Field(10.0, gt=0)
    """How long the service may hold back an answer, and how often it is asked."""
    patience_s: float = Field(30.0, ge=0)
    """How long the service may be unreachable while its agent runs."""
    key: str = "reward"
    """Which entry trains, where the service reports a dictionary."""
    log_bytes: int = Field(1 << 20, ge=1024)


class HttpLauncher:
    def __init__(self, settings: HttpSettings) -> None:
        """Raises ConfigurationError: the token's variable is not set."""
        self._settings = settings
        self._http: aiohttp.ClientSession | None = None
        self._headers: dict[str, str] = {"Content-Type": "application/json"}
        self._callbacks: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """By trial, its secret in front: what the service must know to be heard."""
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        if settings.api_key_env is not None:
            if settings.api_key_env not in os.environ:
                raise ConfigurationError(
                    f"http.api_key_env: the variable {settings.api_key_env!r} is not set; "
                    "export it with the agent service's token"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[settings.api_key_env]}"

    async def run(self, trial: Trial) -> AgentResult:
        make_workspace(trial, None)
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
            error = f"ended by us at its deadline, after {wall_s:.1f} s"
            return AgentResult(AgentEnd.TIMED_OUT, error, wall_s)
        except asyncio.CancelledError:
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
            "task": dict(trial.task.data),
            "prompt": prompt_of(trial.task.data),
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
                    raise LaunchError(f"agent service: its callback says {status!r}")
            else:
                status = await self._poll(trial_id)
        return status

    async def _poll(self, trial_id: str) -> dict[str, Any]:
        """One answer, not sooner than `poll_s` after the last where it says `running`."""
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
        """Through a cancellation too. Raises LaunchError: the service did not confirm."""
        ending = asyncio.ensure_future(self._call("DELETE", f"{self._settings.url}/{trial_id}"))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    async def _call(self, method: str, url: str, body: Any = None) -> dict[str, Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers)
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
        logs = str(final.get("logs", "")).encode()[-self._settings.log_bytes :]
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
                runner = web.AppRunner(app, access_log=None)
                await runner.setup()
                await web.TCPSite(runner, settings.host, settings.port).start()
                self._runner = runner
        if settings.public_url is not None:
            return settings.public_url.rstrip("/")
        return f"http://{settings.host}:{self._runner.addresses[0][1]}"

    async def _called_back(self, request: web.Request) -> web.Response:
        given = request.match_info["secret"]
        for secret, waiting in self._callbacks.items():
            if hmac.compare_digest(secret.encode(), given.encode()):
                if not waiting.done():
                    waiting.set_result(_object(await request.read(), "callback"))
                return web.json_response({})
        return web.json_response({"error": "no such run, or it has ended"}, status=404)


class _Unreachable(LaunchError):
    """The service did not answer: asked again within `patience_s` where that is safe."""


def _object(raw: bytes, origin: str) -> dict[str, Any]:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise LaunchError(f"agent service: {origin}: not a JSON object: {raw[:80]!r}")
    return value
