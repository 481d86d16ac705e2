"""`AgentRunClient`: submits runs to a `harbor-server` and follows them.

Invariant: a request is retried only if that cannot start a second run. Reading and cancelling can
be repeated safely. A submission carries an idempotency key, so that repeating it returns the same
run.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from harbor_sdk.archive import pack_task
from harbor_sdk.errors import AgentRunError
from harbor_sdk.models import AgentRun, AgentRunRequest, RunEvent, RunList

ATTEMPTS = 5
MAX_BACKOFF_S = 10.0
LONG_POLL_S = 30.0
"""Shorter than the idle timeouts of load balancers and connection trackers."""
REQUEST_TIMEOUT_S = 60.0
SUBMIT_TIMEOUT_S = 300.0
"""Time limit of one attempt, including the upload."""

_Model = TypeVar("_Model", AgentRun, RunList, RunEvent)

_CODES = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    413: "too_large",
    422: "invalid",
    429: "queue_full",
}


class AgentRunClient:
    """A client of one `harbor-server`.

    Example:
        async with AgentRunClient("http://127.0.0.1:8090") as client:
            run = await client.submit(AgentRunRequest(agent=AgentSpec(name="oracle")), task=folder)
            run = await client.wait(run.run_id, timeout_s=600.0)
            print(run.status, run.rewards)
    """

    def __init__(
        self, server_url: str, *, token: str | None = None, proxy: str | None = None
    ) -> None:
        """`token` is the server's token. Default: the variable HARBOR_SERVER_TOKEN, or the content
        of the file that HARBOR_SERVER_TOKEN_FILE names. `proxy`: URL of an HTTP proxy through which
        the server is reached. Raises OSError: the file cannot be read."""
        self._base = server_url.rstrip("/")
        token = token or os.environ.get("HARBOR_SERVER_TOKEN")
        if token is None and (file := os.environ.get("HARBOR_SERVER_TOKEN_FILE")):
            token = Path(file).read_text(encoding="utf-8").strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections to the server. Runs continue."""
        if self._session is not None:
            await self._session.close()

    async def is_up(self) -> bool:
        """Whether the server answers now."""
        try:
            await self._json("GET", "/health", timeout_s=10.0)
        except AgentRunError:
            return False
        return True

    async def submit(
        self,
        request: AgentRunRequest,
        *,
        task: Path | bytes | None = None,
        idempotency_key: str | None = None,
    ) -> AgentRun:
        """Queues a run and returns immediately.

        `task` is a folder, or its tar.gz, to upload. Without it, the server uses the request's
        `task_path` (a path on the server) or `task_name` (in Harbor's registry).

        Raises:
            AgentRunError: `invalid`, `conflict`, `too_large`; `queue_full` or `unreachable` after
                `ATTEMPTS` attempts.
        """
        archive = await asyncio.to_thread(pack_task, task) if isinstance(task, Path) else task
        key = idempotency_key or secrets.token_hex(16)
        metadata = request.model_dump_json(exclude_defaults=True)

        def form() -> aiohttp.FormData:
            data = aiohttp.FormData()
            data.add_field("metadata", metadata, content_type="application/json")
            if archive is not None:
                data.add_field(
                    "task_archive",
                    io.BytesIO(archive),
                    filename="task.tar.gz",
                    content_type="application/gzip",
                )
            return data

        async for attempt in _retrying():
            with attempt:
                body = await self._json(
                    "POST",
                    "/api/v1/runs?wait_s=0",
                    data=form(),
                    headers={"Idempotency-Key": key},
                    timeout_s=SUBMIT_TIMEOUT_S,
                )
        return _parsed(AgentRun, body)

    async def get(self, run_id: str) -> AgentRun:
        """The run in its present state."""
        return _parsed(AgentRun, await self._read(f"/api/v1/runs/{run_id}"))

    async def wait(self, run_id: str, *, timeout_s: float) -> AgentRun:
        """Waits by long-poll, and returns the run in its final state. Raises AgentRunError with the
        code `timeout` after `timeout_s`; the run continues."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(LONG_POLL_S, left_s)
            run = _parsed(AgentRun, await self._read(f"/api/v1/runs/{run_id}?wait_s={wait_s:.3f}"))
            if run.status.is_final:
                return run
        raise AgentRunError(
            f"run {run_id} has not ended after {timeout_s} s: wait again, or cancel it",
            code="timeout",
        )

    async def list(
        self,
        *,
        job_id: str | None = None,
        status: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> RunList:
        """One page of runs, newest first. `job_id` and `status` select."""
        query = {"job_id": job_id, "status": status, "limit": str(limit), "offset": str(offset)}
        return _parsed(
            RunList,
            await self._read(
                "/api/v1/runs", params={k: v for k, v in query.items() if v is not None}
            ),
        )

    async def cancel(self, run_id: str) -> AgentRun:
        """Cancels the run, and returns when the run and its environment have ended. Cancelling a
        run again is not an error."""
        async for attempt in _retrying():
            with attempt:
                body = await self._json("DELETE", f"/api/v1/runs/{run_id}")
        return _parsed(AgentRun, body)

    async def events(self, run_id: str) -> AsyncIterator[RunEvent]:
        """Yields every change of the run up to its final state. A broken stream is resumed after
        the last event."""
        last = 0
        failures = 0
        while True:
            try:
                async for event in self._stream(run_id, last):
                    last, failures = event.number, 0
                    yield event
                    if event.kind == "status" and event.run.status.is_final:
                        return
                failures += 1
            except AgentRunError as error:
                failures += 1
                if not error.retryable or failures >= ATTEMPTS:
                    raise
            if failures >= ATTEMPTS:
                raise AgentRunError(
                    f"the event stream of run {run_id} ended {failures} times without a new event",
                    code="protocol",
                )
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.2 * 2**failures))

    async def logs(self, run_id: str, *, tail_bytes: int = 2**20) -> str:
        """The last `tail_bytes` of the trial's log."""
        content = await self._bytes(f"/api/v1/runs/{run_id}/logs?tail_bytes={tail_bytes}")
        return content.decode(errors="replace")

    async def artifacts(self, run_id: str) -> Mapping[str, int]:
        """Path of each file in the trial's folder → its size in bytes."""
        body = await self._read(f"/api/v1/runs/{run_id}/artifacts")
        return {entry["path"]: entry["bytes"] for entry in body["files"]}

    async def artifact(self, run_id: str, path: str) -> bytes:
        """The content of a file in the trial's folder."""
        return await self._bytes(f"/api/v1/runs/{run_id}/artifacts/{quote(path)}")

    async def _read(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        async for attempt in _retrying():
            with attempt:
                body = await self._json("GET", path, params=params)
        return body

    async def _bytes(self, path: str) -> bytes:
        async for attempt in _retrying():
            with attempt:
                _, content = await self._request("GET", path)
        return content

    async def _json(self, method: str, path: str, **options: Any) -> Any:
        status, content = await self._request(method, path, **options)
        try:
            return json.loads(content)
        except ValueError:
            raise AgentRunError(
                f"{method} {path}: the answer is not JSON ({content[:80]!r}): check that "
                f"{self._base} is a harbor-server",
                code="protocol",
                status=status,
            ) from None

    async def _request(
        self, method: str, path: str, *, timeout_s: float = REQUEST_TIMEOUT_S, **options: Any
    ) -> tuple[int, bytes]:
        try:
            async with self._http().request(
                method,
                self._base + path,
                timeout=aiohttp.ClientTimeout(total=timeout_s, connect=10.0),
                **options,
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(self._base, error) from error
        if response.status >= 400:
            raise _refused(response.status, content, response.headers)
        return response.status, content

    async def _stream(self, run_id: str, last: int) -> AsyncIterator[RunEvent]:
        timeout = aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=REQUEST_TIMEOUT_S)
        try:
            async with self._http().get(
                f"{self._base}/api/v1/runs/{run_id}/events",
                headers={"Last-Event-ID": str(last)},
                timeout=timeout,
                read_bufsize=2**24,
            ) as response:
                if response.status >= 400:
                    raise _refused(response.status, await response.read(), response.headers)
                async for line in response.content:
                    if line.startswith(b"data: "):
                        yield _parsed(RunEvent, json.loads(line[6:]))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _unreachable(self._base, error) from error

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_keep_alive_socket)
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=connector, proxy=self._proxy
            )
        return self._session


def _keep_alive_socket(address: Any) -> socket.socket:
    """A socket that reports after about a minute that its peer has vanished."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # macOS has the same option under another name.
    idle = getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE  # type: ignore[attr-defined]
    made.setsockopt(socket.IPPROTO_TCP, idle, 30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return made


def _retrying() -> AsyncRetrying:
    return AsyncRetrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, AgentRunError) and error.retryable
        ),
        stop=stop_after_attempt(ATTEMPTS),
        wait=_backoff_s,
        reraise=True,
    )


def _backoff_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    wanted = error.retry_after_s if isinstance(error, AgentRunError) else None
    return min(MAX_BACKOFF_S, wanted or 0.2 * 2**state.attempt_number)


def _unreachable(base: str, error: Exception) -> AgentRunError:
    reason = str(error) or type(error).__name__
    return AgentRunError(
        f"harbor-server at {base} cannot be reached: {reason}", code="unreachable", retryable=True
    )


def _refused(status: int, content: bytes, headers: Mapping[str, str]) -> AgentRunError:
    try:
        error = json.loads(content)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        code, message = _CODES.get(status, "server"), content[:200].decode(errors="replace")
    retry_after = headers.get("Retry-After", "")
    return AgentRunError(
        f"HTTP {status}: {message}",
        code=code,
        status=status,
        retryable=status in (429, 502, 503, 504),
        retry_after_s=float(retry_after) if retry_after.isdigit() else None,
    )


def _parsed(kind: type[_Model], body: Any) -> _Model:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise AgentRunError(f"the server's answer is invalid: {error}", code="protocol") from None
