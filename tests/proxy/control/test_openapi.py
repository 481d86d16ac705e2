"""The responses of the control plane match the OpenAPI document."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest
from pydantic import BaseModel

from proxy.control import schema
from proxy.http.openapi import ErrorBody, Nothing
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}


async def test_responses_match_the_openapi_document(proxy: RunningProxy) -> None:
    async def call(method: str, path: str, status: int, model: type[BaseModel], **body: Any) -> Any:
        data = orjson.dumps(body) if body else None
        async with proxy.http.request(
            method, proxy.url + path, data=data, headers=HEADERS
        ) as response:
            text = await response.read()
            assert response.status == status, text
            return model.model_validate_json(text)

    async with proxy.http.get(proxy.url + "/openapi.json") as response:
        assert (await response.json())["openapi"] == "3.1.0"
    await call("GET", "/health", 200, schema.ProcessStatus)
    await call("GET", "/ready", 200, schema.ProcessStatus)
    limits = {"max_turns": 9}
    await call(
        "POST", "/sessions/t", 201, schema.SessionCreated, sampling={"top_k": 5}, limits=limits
    )
    session = await proxy.session(metadata={"a": 1})
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    assert (await proxy.post(session, "chat/completions", body))[0] == 200
    own = f"/sessions/{session.trial_id}"
    await call("POST", own + "/rewards", 200, schema.Added, value=1, parts={"x": 0.5}, turn=0)
    await call("GET", "/sessions?limit=2", 200, schema.SessionList)
    await call("GET", own, 200, schema.SessionRecord)
    await call("GET", own + "/trajectories", 200, schema.SessionTrajectories)
    await call("GET", own + "/events", 200, schema.Events)
    await call("POST", own + "/complete", 200, Nothing)
    await call("GET", own + "/events?wait=completed", 200, schema.Events)
    version = {"version": 3, "adapter": "planner@3.aa"}
    await call("PUT", "/policies/planner/version", 200, schema.PolicyView, **version)
    engines = await call("GET", "/engines", 200, schema.Engines)
    assert [(each.name, each.version) for each in engines.policies] == [("planner", 3)]
    await call("DELETE", "/policies/planner/runs/some-run", 200, Nothing)
    await call("POST", "/engines", 201, schema.EngineAdded, url="http://127.0.0.1:9", name="x")
    await call("DELETE", "/engines/x", 200, Nothing)
    await call("POST", "/engines/pause", 200, schema.Paused)
    await call("POST", "/engines/resume", 200, schema.Paused)
    await call("PUT", "/policy_version", 200, schema.Version, version=3)
    await call("GET", "/sessions/none", 404, ErrorBody)
    await call("DELETE", own, 200, Nothing)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/sessions", {"kind": "test"}, "kind"),
        ("/sessions", {"limits": {"max_turn": 1}}, "limits.max_turn"),
        ("/sessions", {"limits": {"max_turns": True}}, "limits.max_turns"),
        ("/sessions", {"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ("/sessions", {"ttl_s": 0}, "ttl_s"),
        ("/sessions", {"metadata": {"a": [2**70]}}, "metadata"),
        ("/sessions", {"sampling": {"seed": 2**70}}, "sampling"),
        ("/sessions", {"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ("/sessions", {"sampling": {"top_p": 7}}, "sampling.top_p"),
        ("/sessions", {"sampling": {"top_k": 1.5}}, "sampling.top_k"),
        ("/sessions", {"metdata": {}}, "metdata"),
        ("/sessions", {"policies": {"small": "a@b"}}, "policies"),
        ("/sessions", {"policies": {"m" * 257: "a"}}, "policies"),
        ("/sessions", {"policies": {str(n): "a" for n in range(65)}}, "policies"),
        ("/engines", {}, "url"),
        ("/engines", {"url": "http://x", "kind": "tgi"}, "kind"),
        ("/engines", {"url": "x:80"}, "engines: 'x:80'"),
    ],
)
async def test_refusal_names_the_field(
    proxy: RunningProxy, path: str, body: dict[str, Any], field: str
) -> None:
    async with (
        aiohttp.ClientSession(headers=HEADERS) as http,
        http.post(proxy.url + path, json=body) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["message"].startswith(field)
