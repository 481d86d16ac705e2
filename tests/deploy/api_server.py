"""A scripted Kubernetes API server, with as much of the API as Helm needs to install a chart.

It has no control plane behind it: it says which kinds exist, keeps what is created, and checks
nothing. The tests then check what it was given.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import yaml
from aiohttp import web

from proxy.http.server import app_runner

KINDS = {
    "v1": {"services": "Service", "configmaps": "ConfigMap", "secrets": "Secret"}
    | {"persistentvolumeclaims": "PersistentVolumeClaim"},
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy", "ingresses": "Ingress"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor"},
    "ray.io/v1": {"rayjobs": "RayJob"},
}
"""API version → name in paths → kind."""
VERBS = ["create", "get", "list", "patch", "update", "delete"]


@dataclass(slots=True)
class ApiServer:
    """Example: `async with api_server() as server: server.created["/api/v1/…/services/vllm"]`"""

    kubeconfig: str
    created: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path → the resource that was created there; Helm's own records are not kept."""

    async def answer(self, request: web.Request) -> web.Response:
        """The answer to any request."""
        if found := _discovery(request.path):
            return web.json_response(found)
        if request.method == "POST":
            return await self._create(request)
        if request.method != "GET":
            return web.json_response({})
        if request.path.endswith("/secrets"):
            return web.json_response({"kind": "SecretList", "apiVersion": "v1", "items": []})
        if request.path in self.created:
            return web.json_response(self.created[request.path])
        missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
        return web.json_response(missing, status=404)

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.content_type != "application/json":  # Helm's record of the release
            return web.Response(body=body, status=201, content_type=request.content_type)
        resource = orjson.loads(body)
        self.created[f"{request.path}/{resource['metadata']['name']}"] = resource
        return web.json_response(resource, status=201)


@asynccontextmanager
async def api_server() -> AsyncIterator[ApiServer]:
    """Listens on a free port of loopback."""
    server = ApiServer("")
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = app_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        server.kubeconfig = yaml.safe_dump(_kubeconfig(url), sort_keys=False)
        yield server
    finally:
        await runner.cleanup()


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(version) for version in KINDS if "/" in version]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    found = re.fullmatch(r"/apis?/(.+)", path)
    if found is None or found[1] not in KINDS:
        return None
    kinds = [
        {"name": name, "kind": kind, "singularName": "", "namespaced": True, "verbs": VERBS}
        for name, kind in KINDS[found[1]].items()
    ]
    return {"kind": "APIResourceList", "groupVersion": found[1], "resources": kinds}


def _group(version: str) -> dict[str, Any]:
    name, _, number = version.partition("/")
    described = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [described], "preferredVersion": described}


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "scripted", "cluster": {"server": url}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "tests", "context": {"cluster": "scripted", "user": "nobody"}}],
        "current-context": "tests",
    }
