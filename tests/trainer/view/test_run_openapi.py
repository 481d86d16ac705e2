"""Every answer to the page, on a recorded run, matches its schema in `/openapi.json`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from jsonschema import ValidationError

from proxy.http.route import Handler, routes_of
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.documented import DOCUMENT, check, check_answer
from tests.proxy.extras.view.recording import record
from tests.trainer.view.recorded_run import begin, training, whole, write_log

HEADERS = {"Authorization": f"Bearer {ADMIN_KEY}"}
FIX = {"session": "fix/sum-1"}
RUN = {"run": "run"}
READS: list[tuple[str, dict[str, Any]]] = [
    ("state", {}),
    ("sessions", {"limit": 1}),
    ("sessions", {"marked": "*", "kind": "train"}),
    ("session", FIX),
    ("session", {"session": "lamps-3"}),
    ("heads", FIX),
    ("turns", {**FIX, "turns": "0,1,2,3,4,5,6"}),
    ("text", {**FIX, "turn": 0, "place": "answer.text", "from": 3}),
    *(("fork", {**FIX, "turn": turn}) for turn in range(7)),
    ("forks", {"cause": "compaction", "limit": 1}),
    ("tokens", {**FIX, "turn": 3, "count": 4000}),
    ("tokens", {"session": "lamps-3", "turn": 1, "count": 4000}),
    ("search", {"text": "sum"}),
    ("search", {"regex": "pri.e", "answers_only": "yes"}),
    ("search", {"tool": "shell"}),
    ("rules", {}),
    ("run", RUN),
    ("run/metrics", RUN),
    ("run/trials", {**RUN, "limit": 200}),
    ("run/step", {**RUN, "step": 2}),
    ("run/trial", {"session": "lamps-3"}),
    ("run/trial", {**FIX}),
    ("run/file", {"session": "lamps-3", "name": "agent.log", "before": 9}),
    ("run/trace", RUN),
]
REFUSALS: list[tuple[str, dict[str, Any], int]] = [
    ("session", {"session": "none"}, 404),
    ("heads", {**FIX, "since": "x"}, 400),
    ("text", {**FIX, "turn": 0, "place": "none"}, 404),
    ("forks", {"cause": "none"}, 400),
    ("search", {}, 400),
    ("tokens", {**FIX, "turn": 99}, 404),
    ("run", {"run": "none"}, 404),
    ("run/trial", {"session": "lamps-3", "run": "none"}, 404),
    ("run/file", {"session": "lamps-3", "name": "task.json", "before": 9}, 404),
    ("run/file", {"session": "lamps-3", "name": "agent.log", "before": -1}, 400),
    ("run/step", {**RUN, "step": -1}, 400),
]
STREAM = "live"


@pytest.fixture
async def recorded(start_proxy: StartProxy, checkpoint: Path, tmp_path: Path) -> RunningProxy:
    """A proxy with a recorded run, and sessions with everything that the page shows."""
    proxy, run = await training(start_proxy, begin(tmp_path / "run", checkpoint))
    await save(proxy, "sums", {"text": "computed twice"})
    await whole(run)
    write_log(run.folder.path, "lamps-3", "a log")
    await record(proxy)
    await proxy.control.complete("fix/sum-1")
    return proxy


async def save(proxy: RunningProxy, name: str, query: dict[str, Any]) -> None:
    body = {"name": name, "query": query}
    check_given("/view/rules", body)
    async with proxy.http.post(proxy.url + "/view/rules", json=body, headers=HEADERS) as response:
        check_answer("/view/rules", "post", response.status, await response.read())


def check_given(path: str, body: Any) -> None:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    check(body, content["schema"])


def handler_of(owner: object, path: str) -> Handler:
    """The method of `owner` that handles requests to the path."""
    return next(partial(r.handler, owner) for r in routes_of(type(owner)) if r.path == path)


async def test_answers_on_a_recorded_run_match_their_schemas(recorded: RunningProxy) -> None:
    for name, query in READS:
        await ask(recorded, name, query, 200)
    for name, query, status in REFUSALS:
        await ask(recorded, name, query, status)
    removed, rated = {"name": "sums"}, {"value": 1.0, "tags": {"kept": "yes"}}
    check_given("/view/rules/remove", removed)
    check_given("/view/session/curation", rated)
    curation = recorded.url + "/view/session/curation"
    async with recorded.http.post(curation, params=FIX, json=rated, headers=HEADERS) as response:
        check_answer("/view/session/curation", "post", response.status, await response.read())
        assert response.status == 200
    export, asked = recorded.url + "/view/session/export", {**FIX, "format": "messages"}
    async with recorded.http.get(export, params=asked, headers=HEADERS) as response:
        said = DOCUMENT["paths"]["/view/session/export"]["get"]["responses"]
        assert response.content_type in said[str(response.status)]["content"]
        assert [orjson.loads(line) for line in (await response.read()).splitlines()]
    for path, body in (
        ("/view/rules/remove", removed),
        ("/view/log_in", {"secret": ADMIN_KEY}),
        ("/view/log_out", {}),
    ):
        url = recorded.url + path
        async with recorded.http.post(url, json=body, headers=HEADERS) as response:
            assert response.status == 200
            check_answer(path, "post", response.status, await response.read())


def test_each_answer_of_the_page_is_checked() -> None:
    reads = {path for path, methods in DOCUMENT["paths"].items() if "get" in methods}
    asked = {f"/view/{name}" for name, _ in READS}
    asked.add("/view/session/export")  # JSON lines
    asked.add("/view/decisions")  # of a learner: tests/proxy/extras/view/test_learning.py
    bytes_of = {"/view/image", "/view/run/report", "/view/static/{name}"}
    assert reads - asked == {"/", *bytes_of, f"/view/{STREAM}"}
    # Publishing is checked in test_published_run.py.
    posts = {path for path, methods in DOCUMENT["paths"].items() if "post" in methods}
    others = {each for each in posts if not each.startswith("/view/runs/")}
    rules = {"/view/rules", "/view/rules/remove"}
    assert others == {"/view/log_in", "/view/log_out", "/view/session/curation", *rules}


async def ask(proxy: RunningProxy, name: str, query: dict[str, Any], status: int) -> None:
    path = f"/view/{name}"
    parameters = {each["name"]: each for each in DOCUMENT["paths"][path]["get"]["parameters"]}
    assert query.keys() <= parameters.keys()
    needed = {each for each, parameter in parameters.items() if parameter["required"]}
    assert status != 200 or needed <= query.keys()
    for key, value in query.items() if status == 200 else ():
        check(value, parameters[key]["schema"])
    async with proxy.http.get(proxy.url + path, params=query, headers=HEADERS) as response:
        body = await response.read()
        assert response.status == status, (name, query, body)
        check_answer(path, "get", status, body)


async def test_events_of_the_stream_match_their_schemas(recorded: RunningProxy) -> None:
    schemas = DOCUMENT["paths"]["/view/live"]["get"]["responses"]["200"]["content"][
        "text/event-stream"
    ]["x-event-data"]
    seen: dict[str, Any] = {}
    async with recorded.http.get(
        recorded.url + "/view/live", params={"after": "0.0.0"}, headers=HEADERS
    ) as response:
        while seen.keys() != schemas.keys():
            kind, data = await event(response)
            check(data, schemas[kind])
            seen[kind] = data
    assert seen["message"]["answered"]
    assert {each["kind"] for each in seen["message"]["events"]} >= {"marked", "refused"}


async def event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    text = (await response.content.readuntil(b"\n\n")).decode()
    kind = re.search(r"^event: (\w+)$", text, re.MULTILINE)
    data = re.search(r"^data: (.*)$", text, re.MULTILINE)
    assert data is not None
    return kind[1] if kind else "message", orjson.loads(data[1])


def test_answer_with_a_key_that_its_schema_lacks_does_not_match() -> None:
    rules: dict[str, Any] = {"rules": [], "may_save": True}
    check_answer("/view/rules", "get", 200, orjson.dumps(rules))
    lacking: dict[str, Any] = {"rules": []}
    for wrong in (rules | {"more": 1}, lacking, rules | {"may_save": 2}):
        with pytest.raises(ValidationError):
            check_answer("/view/rules", "get", 200, orjson.dumps(wrong))
