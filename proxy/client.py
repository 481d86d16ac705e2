"""`ProxyClient`: the client of the proxy's control plane.

Invariant: it never retries. A call returns the proxy's answer or raises an exception. The caller
knows whether the call is idempotent and decides whether to repeat it. `patiently`
repeats one while the proxy is being restarted.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from proxy.admin_key import client_key
from proxy.http.server import sent_body
from proxy.machine.direct_hosts import proxy_for
from proxy.records import (
    Origin,
    Quota,
    RecordedImage,
    Reward,
    ServedPolicy,
    Session,
    SessionKind,
    Turn,
)
from proxy.records.binary import CONTENT_TYPE, decode_record, origin_fields


@dataclass(frozen=True, slots=True)
class SessionHandle:
    """What an agent needs. Example: SessionHandle("t-1", "sk-…", "http://127.0.0.1:8000/t-1/v1",
    "http://127.0.0.1:8000/t-1", 1.78e9)"""

    trial_id: str
    api_key: str
    base_url: str
    """For OPENAI_BASE_URL: ends in `/v1`."""
    anthropic_base_url: str
    """For ANTHROPIC_BASE_URL: without `/v1`."""
    expires_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Happening:
    """What the page in the browser gets, live. Example: Happening("17.16.3", {"begun": [], …})"""

    position: str
    """For `watch`, to go on after this."""
    news: dict[str, Any] | None = None
    """Turns that began (`begun`) or ended (`answered`), and `events`."""
    state: dict[str, Any] | None = None
    """The engines, and how many calls wait."""


__all__ = ["Happening", "ProxyClient", "ProxyClientError", "SessionHandle", "UntrustedProxy"]

TRUSTED = "SSL_CERT_FILE"
"""The variable that OpenSSL, and so Python, reads."""

PLACE_TIMEOUT_S = 300.0
"""Seconds that a call waits for a free connection: thousands of trials may begin at once."""


class ProxyClientError(Exception):
    """The proxy returned an error. `status` is the HTTP status; 0 if the proxy did not answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UntrustedProxy(ProxyClientError):
    """Something answers, but TLS with it fails: its certificate is not trusted, is for another
    host, or it does not speak TLS. `status` is 0."""


class ProxyClient:
    """Example:
    async with ProxyClient("http://127.0.0.1:8000", admin_key) as proxy:
        session = await proxy.create_session(kind=SessionKind.TRAIN, sampling={"temperature": 1.0})
        await proxy.complete(session.trial_id)  # after an agent has run on session.base_url
        record, turns = await proxy.get_turns(session.trial_id)
    """

    def __init__(
        self,
        base_url: str,
        admin_key: str | None = None,
        *,
        timeout_s: float = 60.0,
        max_connections: int = 100,
    ) -> None:
        """Without `admin_key` the one that `proxy.admin_key.client_key` finds: the environment's,
        or, for a proxy on this machine, that of the default store."""
        self.base_url = base_url.rstrip("/")
        self.admin_key = admin_key or client_key(base_url)
        self._headers = {"Authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        self._timeout_s = timeout_s
        self._max_connections = max_connections
        self._places = asyncio.Semaphore(max_connections)
        """Outside the connector, whose queue would count towards a call's time limit."""
        self._http: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    async def create_session(
        self,
        trial_id: str | None = None,
        *,
        kind: SessionKind | None = None,
        sampling: Mapping[str, Any] | None = None,
        policies: Mapping[str, str] | None = None,
        profile: str = "default",
        limits: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
    ) -> SessionHandle:
        """Creates a session; the proxy chooses its id if `trial_id` is None. `policies` maps the
        model names that the agent may request to policies; `""` stands for all other names. `kind`
        is `train` if it is None, or `eval` if all engines of the proxy only return text.

        Raises:
            ProxyClientError: with status 409 if the id exists.
        """
        body = {
            "kind": kind,
            "sampling": dict(sampling or {}),
            "policies": dict(policies or {}),
            "profile": profile,
            "limits": dict(limits or {}),
            "metadata": dict(metadata or {}),
            "ttl_s": ttl_s,
        }
        path = "/sessions" if trial_id is None else _session_path(trial_id)
        return SessionHandle(**await self._json("POST", path, body))

    async def branch(
        self,
        origin: Origin,
        trial_id: str | None = None,
        *,
        kind: SessionKind | None = None,
        sampling: Mapping[str, Any] | None = None,
        policies: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        ttl_s: float | None = None,
    ) -> SessionHandle:
        """Creates a session that begins with the turns of another one (docs/rewind.md). What is
        None is taken over from that session, except for the metadata and the time to live.

        Raises:
            ProxyClientError: with status 404 if there is no such session, 400 if it has fewer
                turns, 409 if the id exists or the session is salvaged already.
        """
        given = {"kind": kind, "sampling": sampling, "policies": policies}
        given |= {"limits": limits, "metadata": metadata}
        body: dict[str, Any] = {name: v for name, v in given.items() if v is not None}
        body |= {"ttl_s": ttl_s, "from": origin_fields(origin)}
        path = "/sessions" if trial_id is None else _session_path(trial_id)
        return SessionHandle(**await self._json("POST", path, body))

    async def get_turns(self, trial_id: str) -> tuple[Session, list[Turn]]:
        """The session and its turns in order. Raises ProxyClientError (404 if it is unknown)."""
        return decode_record(
            await self._bytes(
                "GET", _session_path(trial_id, "trajectories"), headers={"Accept": CONTENT_TYPE}
            )
        )

    async def image(self, trial_id: str, sha256: str) -> bytes:
        """An image of a turn (`Turn.images`), as the agent sent it. Raises ProxyClientError (404:
        no turn of the session has it) and ValueError (the bytes are others)."""
        return (await self.recorded_image(trial_id, sha256)).data

    async def recorded_image(self, trial_id: str, sha256: str) -> RecordedImage:
        """As `image`, with what it is."""
        path = _session_path(trial_id, f"images/{sha256}")
        data, media_type = await self._answer("GET", path)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"the proxy sent other bytes than the image {sha256} has")
        return RecordedImage(sha256, media_type, data)

    async def show(self, trial_id: str) -> dict[str, Any]:
        """The session without its tokens: status, turns, forks and their causes, rewards."""
        return await self._json("GET", _session_path(trial_id))

    async def list_sessions(self, **where: str | int) -> list[dict[str, Any]]:
        """`where`: status, kind, id_prefix, after, limit (as `SessionFilter`)."""
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in where.items())
        listing = await self._json("GET", f"/sessions?{query}")
        sessions: list[dict[str, Any]] = listing["sessions"]
        return sessions

    async def add_reward(self, trial_id: str, reward: Reward) -> bool:
        """Returns False if the session already has a reward with this key, which is kept."""
        body: dict[str, Any] = {"key": reward.key, "value": reward.value}
        body |= {"parts": dict(reward.parts), "turn": reward.turn, "branch": reward.branch}
        answer = await self._json("POST", _session_path(trial_id, "rewards"), body)
        return bool(answer["added"])

    async def curate(
        self,
        trial_id: str,
        *,
        value: float | None = None,
        comment: str = "",
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Keeps what a person says of the session: the reward `rating`, which replaces an earlier
        one, and entries of its metadata, of which an empty text removes one."""
        body = {"value": value, "comment": comment, "tags": dict(tags or {})}
        await self._json("POST", _session_path(trial_id, "curation"), body)

    async def wait_reward(self, trial_id: str, *, timeout_s: float) -> bool:
        """Waits for a reward; False after `timeout_s`, or if the session ends without one."""
        try:
            async with asyncio.timeout(timeout_s), self._event_stream(trial_id, 0) as response:
                # Checked after the stream is open, so that no reward is missed in between.
                if (await self.show(trial_id))["rewards"]:
                    return True
                async for line in response.content:
                    if line.startswith(b"data: ") and orjson.loads(line[6:])["kind"] == "reward":
                        return True
        except TimeoutError:
            pass
        return False

    async def complete(self, trial_id: str) -> None:
        """Ends the session: calls in flight are cut, later calls get 409."""
        await self._json("POST", _session_path(trial_id, "complete"))

    async def delete(self, trial_id: str) -> None:
        await self._json("DELETE", _session_path(trial_id))

    async def wait_completed(self, trial_id: str, *, timeout_s: float) -> bool:
        """Returns True once the session is completed or expired, or False after `timeout_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:  # one request waits for at most 5 minutes
            left_s = max(0.0, until - loop.time())
            path = _session_path(trial_id, "events") + f"?wait=completed&timeout_s={left_s}"
            try:
                async with asyncio.timeout(left_s + self._timeout_s), self._stream(path) as answer:
                    completed = bool(orjson.loads(await answer.read())["completed"])
            except TimeoutError as error:
                raise self._no_answer("GET", path, error) from error
            if completed or loop.time() >= until:
                return completed

    async def events(self, trial_id: str, since: int = 0) -> AsyncIterator[dict[str, Any]]:
        """Yields events `{seq, at, kind, …}` as they happen, until the session ends."""
        async with self._event_stream(trial_id, since) as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    yield orjson.loads(line[6:])

    async def past_events(self, trial_id: str) -> list[dict[str, Any]]:
        """The events until now, as `events` yields them."""
        found: list[dict[str, Any]] = (await self._json("GET", _session_path(trial_id, "events")))[
            "events"
        ]
        return found

    async def search(self, text: str, before: int) -> tuple[list[Any], int | None]:
        """Turns with this text that began before a place in the record, of those that one request
        reads, as `GET /view/search` has them; and where to go on."""
        query = urlencode({"text": text, "before": before})
        found = await self._json("GET", f"/view/search?{query}")
        return found["hits"], found["next"]

    async def watch(self, position: str = "") -> AsyncGenerator[Happening, None]:
        """Yields what happens in all sessions until the proxy stops, first the last 500 turns and
        events, or what came after `position`. A key for reading (`agentic-proxy view-key`) is
        enough."""
        async with self._stream("/view/live", {"Last-Event-ID": position}) as response:
            rest = b""
            async for part in response.content.iter_any():
                *whole, rest = (rest + part).split(b"\n\n")
                for event in whole:
                    lines = (line.partition(b": ") for line in event.split(b"\n"))
                    fields = {name.decode(): value for name, _, value in lines}
                    if "data" not in fields or fields.get("event") == b"end":
                        continue
                    data = orjson.loads(fields["data"])
                    if fields.get("event") == b"state":
                        yield Happening(position, state=data)
                    else:
                        position = fields["id"].decode()
                        yield Happening(position, news=data)

    async def engines(self) -> list[dict[str, Any]]:
        """One entry per engine, with the fields of `EngineInfo`."""
        engines: list[dict[str, Any]] = (await self._json("GET", "/engines"))["engines"]
        return engines

    async def add_engine(self, url: str, *, kind: str = "vllm", name: str | None = None) -> None:
        await self._json("POST", "/engines", {"url": url, "kind": kind, "name": name})

    async def remove_engine(self, name: str) -> None:
        await self._json("DELETE", f"/engines/{quote(name, safe='')}")

    async def pause(self) -> None:
        """Holds new calls until `resume`; waiting agents get keep-alives."""
        await self._json("POST", "/engines/pause")

    async def resume(self) -> None:
        await self._json("POST", "/engines/resume")

    async def set_policy_version(self, version: int) -> None:
        """Sets the version of the weights, for engines that do not report it themselves."""
        await self._json("PUT", "/policy_version", {"version": version})

    async def publish_policy(self, name: str, version: int, adapter: str, run: str = "") -> None:
        """Makes an adapter that the engines serve the current version of a policy, which then
        belongs to this run, if one is given.

        Raises:
            ProxyClientError: 409, it belongs to another run.
        """
        path = f"/policies/{quote(name, safe='')}/version"
        await self._json("PUT", path, {"version": version, "adapter": adapter, "run": run})

    async def policies(self) -> list[ServedPolicy]:
        """The published policies."""
        return [ServedPolicy(**each) for each in (await self._json("GET", "/engines"))["policies"]]

    async def release_policy(self, name: str, run: str) -> None:
        """Lets other runs publish the policy, or without a name the weights, if it belongs to this
        run."""
        of = f"/policies/{quote(name, safe='')}" if name else "/weights"
        await self._json("DELETE", f"{of}/runs/{quote(run, safe='')}")

    async def publish_weights(self, **new: Any) -> None:
        """Makes every relay worker pull published weights; `new` as in `NewWeights`."""
        await self._json("PUT", "/weights", new)

    async def held_types(self, tensors: list[Any]) -> dict[str, Any]:
        """The `HeldTypes` of weights; `tensors` as in `TensorsView`."""
        return await self._json("POST", "/weights/types", {"tensors": tensors})

    async def weights(self, wait_s: float = 0.0) -> dict[str, Any]:
        """A `WeightsView`, once all workers have settled or after `wait_s`."""
        return await self._json("GET", f"/weights?wait_s={wait_s:g}")

    async def set_quota(
        self,
        name: str,
        *,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        reset: bool = False,
    ) -> Quota:
        """Sets what all sessions whose `limits` have `{"quota": name}` may use together; None: no
        limit. With `reset`, counting begins again at 0."""
        body = {"max_turns": max_turns, "max_tokens": max_tokens, "reset": reset}
        return Quota(**await self._json("PUT", f"/quotas/{quote(name, safe='')}", body))

    async def remove_quota(self, name: str) -> None:
        """Removes the quota; sessions that name it can make no more calls."""
        await self._json("DELETE", f"/quotas/{quote(name, safe='')}")

    async def quotas(self) -> list[Quota]:
        """All quotas, and how much of each is used."""
        return [Quota(**each) for each in (await self._json("GET", "/quotas"))["quotas"]]

    async def health(self) -> dict[str, Any]:
        return await self._json("GET", "/health")

    async def ready(self) -> bool:
        """Whether the proxy's store works and one of its engines answers."""
        try:
            await self._json("GET", "/ready")
        except ProxyClientError as error:
            if error.status not in (0, 503):
                raise
            return False
        return True

    async def close(self) -> None:
        opened = [http for http in (self._http, self._streams) if http is not None]
        self._http = self._streams = None  # a call during the close opens its own
        for http in opened:
            await http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        data = await self._bytes(method, path, body)
        answer: dict[str, Any] = orjson.loads(data) if data else {}
        return answer

    async def _bytes(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        return (await self._answer(method, path, body, headers=headers))[0]

    async def _answer(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, str]:
        """The answer's body and its media type."""
        kind = {} if body is None else {"Content-Type": "application/json"}
        await self._take_place(method, path)
        try:
            async with self._client().request(
                method,
                self.base_url + path,
                data=None if body is None else sent_body(orjson.dumps(body)),
                headers={**self._headers, **kind, **(headers or {})},
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            ) as response:
                await _raise_for_status(response)
                return await response.read(), response.content_type
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._no_answer(method, path, error) from error
        finally:
            self._places.release()

    async def _take_place(self, method: str, path: str) -> None:
        try:
            async with asyncio.timeout(PLACE_TIMEOUT_S):
                await self._places.acquire()
        except TimeoutError:
            message = f"{method} {path}: none of {self._max_connections} connections became free"
            raise ProxyClientError(f"{message} within {PLACE_TIMEOUT_S:.0f} s", 0) from None

    def _no_answer(self, method: str, path: str, error: Exception) -> ProxyClientError:
        where = f"{method} {path}: the proxy at {self.base_url}"
        if isinstance(error, aiohttp.ClientSSLError):
            found = getattr(error, "certificate_error", None) or error.os_error
            what = f"the file of a private certificate authority belongs into {TRUSTED}"
            return UntrustedProxy(f"{where} is not trusted ({found}); {what}", 0)
        return ProxyClientError(f"{where} did not answer: {error!r}", 0)

    @asynccontextmanager
    async def _event_stream(
        self, trial_id: str, since: int
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        path = _session_path(trial_id, "events") + f"?since={since}"
        async with self._stream(path) as response:
            yield response

    @asynccontextmanager
    async def _stream(
        self, path: str, more: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {**self._headers, "Accept": "text/event-stream", **(more or {})}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s)
        if self._streams is None:
            # No limit, because a waiting stream must not take a connection from a call.
            self._streams = self._pool()
        try:
            async with self._streams.get(
                self.base_url + path, headers=headers, timeout=timeout
            ) as response:
                await _raise_for_status(response)
                yield response
        except aiohttp.ClientError as error:
            message = f"GET {path}: lost the connection to the proxy at {self.base_url}: {error!r}"
            raise ProxyClientError(message, 0) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = self._pool()
        return self._http

    def _pool(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, proxy=proxy_for(self.base_url))


def _session_path(trial_id: str, *parts: str) -> str:
    return "/".join(["/sessions", quote(trial_id, safe="/"), *parts])


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    text = (await response.read()).decode(errors="replace")
    try:
        message = orjson.loads(text)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = text[:500]
    where = f"{response.method} {response.url.path}"
    raise ProxyClientError(f"{where}: {response.status} {message}", response.status)


Result = TypeVar("Result")
AWAY = frozenset({0, 502, 503, 504})
"""Status of a control call that found no proxy: 502 and 504 are a load balancer's."""


async def patiently(call: Callable[[], Awaitable[Result]], patience_s: float) -> Result:
    """Repeats a control call while the proxy cannot be reached, for at most `patience_s`.

    Raises:
        ProxyClientError: the proxy refused the call, or could not be reached in this time.
    """
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(_is_away),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential(multiplier=0.05, max=2.0),
        reraise=True,
    ):
        with attempt:
            result = await call()
    return result


def _is_away(error: BaseException) -> bool:
    return isinstance(error, ProxyClientError) and error.status in AWAY
