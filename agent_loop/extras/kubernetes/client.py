"""The requests to the Kubernetes API, and one watch of all pods of a run.

    watch ──▶ ended by the server, silent, or not understood ──▶ resumed after the last event
          ├─▶ 410, or restarted for the next trial ──▶ all pods are listed
          └─▶ refused, or an unexpected error ──▶ shown to all that follow

Invariant: a request is repeated only if that has no second effect: names of objects are chosen by
this process, so a repeated creation finds the object. A watch that ends is resumed after the last
event; if the server no longer has that event (410), the pods are listed again, so that no change
of a pod that is followed is missed. Credentials that the server refuses (401) are read again once,
because those that a kubeconfig's program or a service account's file give expire.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from agent_loop.errors import LaunchError
from agent_loop.extras.kubernetes.objects import TRIAL_LABEL, Object
from proxy.errors import ConfigurationError

REQUEST_TIMEOUT_S = 60.0
WATCH_S = 300
"""Seconds after which the server ends a watch."""
SILENT_S = 90.0
"""Seconds without data after which a watch is resumed on a new connection: the old one may be
broken. A server sends a bookmark about once a minute."""
RENEW_S = 60.0
"""Seconds between two readings of credentials that the server refuses."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RETRYABLE = frozenset({429, 500, 502, 503, 504})
GONE = 410
HINTS = {
    401: "; the credentials are not valid or have expired: renew those that the kubeconfig names",
    403: "; give the service account the role in docs/placement.md",
}
RETRY_S = 1.0
"""Seconds before a watch that failed is tried again."""

_log = logging.getLogger(__name__)


class KubernetesError(LaunchError):
    """The API refused a request, or did not answer; `status` is 0 if it did not."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Kubernetes:
    """Example: await kubernetes.create("batch/v1", "jobs", job)"""

    def __init__(
        self, api: Any, kubeconfig: Path | None, namespace: str, patience_s: float
    ) -> None:
        """`api` is a `kubernetes_asyncio.client.ApiClient`."""
        self._api = api
        self._kubeconfig = kubeconfig
        self.namespace = namespace
        self._patience_s = patience_s
        self._renewing = asyncio.Lock()
        self._renewals = 0
        self._renewed_at = -math.inf

    @classmethod
    async def open(
        cls, kubeconfig: Path | None, namespace: str | None, patience_s: float
    ) -> Kubernetes:
        """Uses the kubeconfig, else this pod's service account, else the user's own kubeconfig.

        Raises:
            LaunchError: there is none of them, or it is not valid.
        """
        from kubernetes_asyncio import client, config  # the import takes seconds

        settings = client.Configuration()
        try:
            own = await _load_credentials(kubeconfig, settings)
        except (config.ConfigException, OSError) as error:
            raise LaunchError(
                f"kubernetes: no cluster ({error}): run in a pod with a service account, or set "
                "remote_agent.kubernetes.kubeconfig"
            ) from None
        return cls(client.ApiClient(settings), kubeconfig, namespace or own, patience_s)

    async def close(self) -> None:
        await self._api.close()

    async def create(self, version: str, kind: str, made: Object) -> Object:
        """Creates the object; if it exists, returns it."""
        try:
            return await self._json("POST", self._path(version, kind), body=made)
        except KubernetesError as error:
            if error.status != 409:
                raise
        return await self.get(version, kind, made["metadata"]["name"])

    async def get(self, version: str, kind: str, name: str) -> Object:
        return await self._json("GET", self._path(version, kind, name))

    async def delete_job(self, name: str) -> None:
        """Deletes the Job after its pods. A Job that does not exist is not an error."""
        body = {"propagationPolicy": "Foreground"}
        try:
            await self._json("DELETE", self._path("batch/v1", "jobs", name), body=body)
        except KubernetesError as error:
            if error.status != 404:
                raise

    async def logs(self, pod: str, container: str) -> AsyncIterator[bytes]:
        """What the container has printed, in parts."""
        path = self._path("v1", "pods", f"{pod}/log")
        async with self._answer("GET", path, {"container": container}) as response:
            async for part in response.content.iter_chunked(1 << 16):
                yield part

    async def list_pods(self, selector: str) -> tuple[list[Object], str]:
        """The pods, and the resource version from which a watch continues."""
        answer = await self._json("GET", self._path("v1", "pods"), {"labelSelector": selector})
        return answer["items"], answer["metadata"]["resourceVersion"]

    async def watch_pods(
        self, selector: str, since: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        """Changes (`ADDED`, `MODIFIED`, `DELETED`, `BOOKMARK`) until the server ends the watch.

        Raises:
            KubernetesError: status 410: changes since `since` are no longer known.
        """
        query = {"labelSelector": selector, "resourceVersion": since, "watch": "true"}
        query |= {"allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        path, timeout = self._path("v1", "pods"), (REQUEST_TIMEOUT_S, SILENT_S)
        async with self._answer("GET", path, query, timeout_s=timeout) as response:
            async for line in _lines(response):
                yield _event(line)

    def _path(self, version: str, kind: str, name: str = "") -> str:
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        return f"{root}/namespaces/{self.namespace}/{kind}{name and f'/{name}'}"

    async def _json(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Any = None
    ) -> Object:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception(_is_away),
            stop=stop_after_delay(self._patience_s),
            wait=wait_exponential(multiplier=0.1, max=5.0),
            reraise=True,
        ):
            with attempt:
                async with self._answer(method, path, query, body=body) as response:
                    answer: Object = orjson.loads(await response.read())
        return answer

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        timeout_s: float | tuple[float, float] = REQUEST_TIMEOUT_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        from kubernetes_asyncio.config import ConfigException

        renewals = self._renewals
        try:
            answer = await self._api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json, */*"},
                body=body,
                auth_settings=["BearerToken"],
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=timeout_s,
            )
            response: aiohttp.ClientResponse = answer
            async with response:
                if response.status == 401 and await self._renewed(renewals):
                    message = f"kubernetes: {method} {path}: 401, the credentials were read again"
                    raise KubernetesError(message, 0)
                if response.status >= 400:
                    raise _refused(method, path, response.status, await response.read())
                yield response
        # Each request may read credentials from a file that is being replaced, and an answer may
        # be a load balancer's.
        except (aiohttp.ClientError, OSError, ConfigException, orjson.JSONDecodeError) as error:
            raise KubernetesError(f"kubernetes: {method} {path}: {error!r}", 0) from error

    async def _renewed(self, renewals: int) -> bool:
        """Reads the credentials again, unless another request has done so since there were
        `renewals`, or those that were read a moment ago are refused, too."""
        async with self._renewing:
            if self._renewals == renewals:
                if time.monotonic() < self._renewed_at + RENEW_S:
                    return False
                self._renewed_at = time.monotonic()
                await _load_credentials(self._kubeconfig, self._api.configuration)
                self._renewals += 1
            return True


Seen = Object | KubernetesError | None
"""A pod, the refusal of the watch, or None: the pod was deleted."""


class PodWatch:
    """Example: with watch.follow(name) as pods: pod = await pods.get()"""

    def __init__(self, kubernetes: Kubernetes, selector: str) -> None:
        self._kubernetes = kubernetes
        self._selector = selector
        self._followed: dict[str, asyncio.Queue[Seen]] = {}
        self._seen: set[str] = set()
        self._version = ""
        """Of the last event; empty: the pods have to be listed."""
        self._watching: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        """The pods were listed, or those that follow were shown why they cannot be."""

    @contextmanager
    def follow(self, name: str) -> Iterator[asyncio.Queue[Seen]]:
        """`name` is the value of the pod's label of its trial."""
        queue = self._followed[name] = asyncio.Queue()
        try:
            yield queue
        finally:
            del self._followed[name]
            self._seen.discard(name)

    def start(self) -> None:
        """Watches until `close`, if it does not already. The pods are listed first."""
        if self._watching is None or self._watching.done():
            self._version = ""
            self._begun.clear()
            self._watching = asyncio.create_task(self._watch())
            self._watching.add_done_callback(self._ended)

    async def begun(self, within_s: float) -> None:
        """A pod that is created afterwards is seen, however soon it is gone. Returns also after
        `within_s`, because the API may not answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._begun.wait()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    def _ended(self, watching: asyncio.Task[None]) -> None:
        """Without a watch, trials would seem to run on until their deadline."""
        if watching.cancelled() or (error := watching.exception()) is None:
            return
        _log.error("the watch of the pods ended", exc_info=error)
        self._show_all(KubernetesError(f"kubernetes: the watch of the pods ended: {error!r}", 0))

    async def _watch(self) -> None:
        """While the API does not answer, trials continue; a refusal is shown to all that follow."""
        while True:
            try:
                if not self._version:
                    await self._list()
                changes = self._kubernetes.watch_pods(self._selector, self._version)
                async with contextlib.aclosing(changes):
                    async for kind, pod in changes:
                        self._version = pod["metadata"]["resourceVersion"]
                        if kind != "BOOKMARK":
                            self._show(pod, deleted=kind == "DELETED")
            except KubernetesError as error:
                if error.status == GONE:
                    self._version = ""
                    continue
                if not _is_away(error):
                    self._show_all(error)
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> None:
        pods, self._version = await self._kubernetes.list_pods(self._selector)
        present = {_trial(pod) for pod in pods}
        for pod in pods:
            self._show(pod, deleted=False)
        for name in self._seen - present:
            self._followed[name].put_nowait(None)
        self._seen &= present
        self._begun.set()

    def _show(self, pod: Object, *, deleted: bool) -> None:
        name = _trial(pod)
        if name in self._followed:
            (self._seen.discard if deleted else self._seen.add)(name)
            self._followed[name].put_nowait(None if deleted else pod)

    def _show_all(self, error: KubernetesError) -> None:
        self._begun.set()
        for queue in self._followed.values():
            queue.put_nowait(error)


def require_client() -> None:
    """
    Raises:
        ConfigurationError: the client's package is not installed.
    """
    from importlib.util import find_spec

    if find_spec("kubernetes_asyncio") is None:
        raise ConfigurationError(
            "remote_agent.kubernetes needs the package kubernetes_asyncio: install the extra "
            "`kubernetes`"
        )


async def _load_credentials(kubeconfig: Path | None, settings: Any) -> str:
    """Sets the cluster's address and the credentials, and returns the namespace. `settings` is a
    `kubernetes_asyncio.client.Configuration`."""
    from kubernetes_asyncio import config

    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=settings)
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    file = str(kubeconfig) if kubeconfig else None
    async with asyncio.timeout(REQUEST_TIMEOUT_S):  # of the kubeconfig's program
        loader = await config.load_kube_config(file, client_configuration=settings)
    return str(loader.current_context["context"].get("namespace", "default"))


def _event(line: bytes) -> tuple[str, Object]:
    try:
        event = orjson.loads(line)
        kind, changed = str(event["type"]), event["object"]
        if kind != "ERROR":
            changed["metadata"]["resourceVersion"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise KubernetesError(f"kubernetes: {line[:200]!r} is not an event of a watch", 0) from None
    if kind == "ERROR":
        raise KubernetesError(f"kubernetes: watch: {changed}", changed.get("code", 0))
    return kind, changed


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """A pod can be longer than aiohttp's bound of a line."""
    rest = b""
    async for part in response.content.iter_any():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line:
                yield line


def _trial(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(TRIAL_LABEL, ""))


def _is_away(error: BaseException) -> bool:
    return isinstance(error, KubernetesError) and error.status in {0, *RETRYABLE}


def _refused(method: str, path: str, status: int, content: bytes) -> KubernetesError:
    try:
        message = str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    return KubernetesError(
        f"kubernetes: {method} {path}: {status} {message}{HINTS.get(status, '')}", status
    )
