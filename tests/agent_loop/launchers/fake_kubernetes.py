"""A fake Kubernetes API server, as far as its documentation describes what the launcher uses.

It keeps Jobs, Secrets and pods, and sends changes of pods to watches. No control plane is behind
it: a test decides what becomes of a pod. A Job gets its pod at once; a deleted Job disappears after
its pod.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml
from aiohttp import web

from proxy.http.server import app_runner

Object = dict[str, Any]
NAMESPACE = "agents"


@dataclass(slots=True)
class FakeKubernetes:
    """Example: `async with fake_kubernetes(folder) as cluster: job = await cluster.job(0)`"""

    kubeconfig: Path
    jobs: dict[str, Object] = field(default_factory=dict)
    """Every Job that exists."""
    created: list[Object] = field(default_factory=list)
    """Every Job that was ever created."""
    deleted: list[str] = field(default_factory=list)
    secrets: dict[str, Object] = field(default_factory=dict)
    pods: dict[str, Object] = field(default_factory=dict)
    """Name of a Job → its pod."""
    logs: bytes = b"the agent's output\n"
    refused: dict[str, str] = field(default_factory=dict)
    """Kind → message of the 403 that its requests get."""
    unavailable: set[str] = field(default_factory=set)
    """Kinds whose requests get the status 503."""
    kept: set[str] = field(default_factory=set)
    """Kinds whose objects do not disappear when they are deleted."""
    without_pods: bool = False
    """Jobs get no pod, as if a quota were used up."""
    gone_as_status: bool = False
    """410 is the status of the answer to a watch, and not an event in it."""
    token: str = ""
    """What requests need in `Authorization`; empty: nothing."""
    garbage: bytes = b""
    """What the next watch sends first."""
    creation: asyncio.Event | None = None
    """Jobs are created only when it is set, even if the client has gone by then."""
    listing: asyncio.Event | None = None
    """Pods are listed only when it is set."""
    creating: asyncio.Event = field(default_factory=asyncio.Event)
    lists: int = 0
    _watches: int = 0
    _silent: int = 0
    """The number of watches, from the first one, that send nothing more."""
    _sent: int = 0
    """Version of the last change that a watch has sent."""
    _versions: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _events: list[tuple[int, str, Object]] = field(default_factory=list)
    _forgotten: int = 0
    """Changes up to this version cannot be watched any more."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _epoch: int = 0

    async def job(self, number: int) -> str:
        """The name of the Job that was created as number `number`, once it has its Secret."""
        async with asyncio.timeout(30):
            while (
                len(self.created) <= number
                or self.created[number]["metadata"]["name"] not in self.secrets
            ):
                await self._change()
        return str(self.created[number]["metadata"]["name"])

    def set_status(self, job: str, status: Object) -> None:
        pod = self.pods[job]
        pod["status"] = status
        self._tell("MODIFIED", pod)

    def delete_pod(self, job: str) -> None:
        self._tell("DELETED", self.pods.pop(job))

    def end_watches(self, *, forget: bool = False) -> None:
        """Closes every watch. `forget`: earlier changes, and those until a watch begins, can only
        be found by a list."""
        self._epoch += 1
        if forget:
            self._forgotten = 1 << 60
        self._notify()

    async def silence_watches(self) -> None:
        """Once they have sent all changes, the present watches send nothing more, as on a
        connection that is broken."""
        async with asyncio.timeout(30):
            while self._sent < self._events[-1][0]:
                await self._change()
        self._silent = self._watches

    async def listed_again(self) -> None:
        lists = self.lists
        async with asyncio.timeout(30):
            while self.lists == lists:
                await self._change()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info.get("name", "")
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if kind in self.unavailable:
            return _status(503, "ServiceUnavailable", "try again")
        if kind in self.refused:
            return _status(403, "Forbidden", self.refused[kind])
        if request.method == "POST":
            if self.creation is not None and kind == "jobs":
                self.creating.set()
                await self.creation.wait()
            return self._create(kind, await request.json())
        if request.path.endswith("/log"):
            return web.Response(body=self.logs)
        if kind == "pods" and name:
            pods = {pod["metadata"]["name"]: pod for pod in self.pods.values()}
            return web.json_response(pods[name]) if name in pods else _status(404, "NotFound", name)
        if kind == "pods":
            return await (self._watch if "watch" in request.query else self._list)(request)
        if name not in self.jobs:
            return _status(404, "NotFound", f'{kind} "{name}" not found')
        if request.method == "DELETE":
            assert (await request.json())["propagationPolicy"] == "Foreground"
            if kind in self.kept:
                return web.json_response(self.jobs[name])
            if name in self.pods:
                self.delete_pod(name)
            self.deleted.append(name)
            self.secrets.pop(name, None)
            return web.json_response(self.jobs.pop(name))
        return web.json_response(self.jobs[name])

    def _create(self, kind: str, made: Object) -> web.Response:
        objects = self.jobs if kind == "jobs" else self.secrets
        name = made["metadata"]["name"]
        if name in objects:
            return _status(409, "AlreadyExists", f'{kind} "{name}" already exists')
        made["metadata"]["uid"] = f"uid-{name}"
        objects[name] = made
        if kind == "jobs":
            self.created.append(made)
            if not self.without_pods:
                template = made["spec"]["template"]
                metadata = {**template["metadata"], "name": f"{name}-x7k2p"}
                self.pods[name] = {"metadata": metadata, "status": {"phase": "Pending"}}
                self._tell("ADDED", self.pods[name])
        self._notify()
        return web.json_response(made, status=201)

    async def _list(self, _: web.Request) -> web.Response:
        self.lists += 1
        self._notify()
        if self.listing is not None:
            await self.listing.wait()
        version = next(self._versions)
        if self._forgotten:
            self._forgotten = version
        self._notify()
        metadata = {"resourceVersion": str(version)}
        return web.json_response({"metadata": metadata, "items": list(self.pods.values())})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self._watches += 1
        epoch, number, since = self._epoch, self._watches, int(request.query["resourceVersion"])
        expired = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
        if since < self._forgotten and self.gone_as_status:
            return _status(410, "Expired", "too old resource version")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self._forgotten:
            await response.write(orjson.dumps({"type": "ERROR", "object": expired}) + b"\n")
            return response
        metadata = {"resourceVersion": str(since)}
        await response.write(
            orjson.dumps({"type": "BOOKMARK", "object": {"metadata": metadata}}) + b"\n"
        )
        if self.garbage:
            await response.write(self.garbage + b"\n")
            self.garbage = b""
        while self._epoch == epoch:
            new = [each for each in self._events if each[0] > since and number > self._silent]
            for version, kind, pod in new:
                since = version
                await response.write(orjson.dumps({"type": kind, "object": pod}) + b"\n")
            if new:
                self._sent = since
                self._notify()
            await self._change()
        return response

    def _tell(self, kind: str, pod: Object) -> None:
        version = next(self._versions)
        pod["metadata"]["resourceVersion"] = str(version)
        self._events.append((version, kind, orjson.loads(orjson.dumps(pod))))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()


@asynccontextmanager
async def fake_kubernetes(
    folder: Path, user: Object | None = None
) -> AsyncIterator[FakeKubernetes]:
    """Listens on a free port of loopback. `user` is the kubeconfig's."""
    cluster = FakeKubernetes(folder / "kubeconfig")
    app = web.Application()
    for root in ("/api/v1", "/apis/batch/v1"):
        path = f"{root}/namespaces/{NAMESPACE}/{{kind}}"
        for more in ("", "/{name}", "/{name}/log"):
            app.router.add_route("*", path + more, cluster.answer)
    runner = app_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        context = {"cluster": "fake", "user": "nobody", "namespace": NAMESPACE}
        cluster.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "fake", "cluster": {"server": url}}],
                    "users": [{"name": "nobody", "user": user or {}}],
                    "contexts": [{"name": "tests", "context": context}],
                    "current-context": "tests",
                }
            )
        )
        yield cluster
    finally:
        cluster.end_watches()
        await runner.cleanup()


def waiting(reason: str, message: str) -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "agent", "state": state}]}


def running() -> Object:
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    return {"phase": "Running", "containerStatuses": [{"name": "agent", "state": state}]}


def ended(code: int = 0, reason: str = "Completed", message: str = "") -> Object:
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:07Z"}
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message, **times}}
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"name": "agent", "state": state}]}


def evicted(reason: str) -> Object:
    """A container that is killed with its pod ends with a code, too."""
    disrupted = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return {**ended(137, "Error"), "conditions": [disrupted]}


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason}
    return web.json_response({**body, "message": message}, status=code)
