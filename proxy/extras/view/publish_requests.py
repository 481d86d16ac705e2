"""The requests by which a trainer that is not ours publishes a run, for the administrator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from proxy.errors import RequestError, SessionError
from proxy.extras.view.json_answer import answer
from proxy.extras.view.parameters import APPENDING, AT, PUBLISHING
from proxy.extras.view.published_run import PublishedRun, PublishedRuns
from proxy.extras.view.publishing import (
    FileEnd,
    PublishedConfig,
    PublishedPhases,
    PublishedSteps,
    PublishedSummary,
    PublishedTrials,
    StepTokens,
)
from proxy.extras.view.query import count
from proxy.extras.view.run_answers import NowJson
from proxy.extras.view.typed_fields import adapter_of
from proxy.http.openapi import Nothing
from proxy.http.route import Who, route
from proxy.http.server import read_body
from proxy.run_files.lines import metrics_fields

T = TypeVar("T")


class PublishRequests:
    """The handlers of published runs. `api` refuses all but the administrator."""

    def __init__(self, runs: PublishedRuns | None) -> None:
        """`runs`: where they are kept; None: nobody can publish."""
        self._runs = runs

    @route(
        "PUT",
        "/view/runs/{name}",
        name="publish",
        who=Who.ADMIN,
        summary="Begins the run of another trainer, or continues it; for the administrator",
        answer=Nothing,
        takes=PublishedConfig,
        refusals=APPENDING,
    )
    async def _begin(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedConfig)
        name, last_step = request.match_info["name"], body.get("last_step")
        await asyncio.to_thread(self._kept().begin, name, body["config"], last_step)
        return answer({})

    @route(
        "POST",
        "/view/runs/{name}/steps",
        name="publish_steps",
        who=Who.ADMIN,
        summary="Appends metrics of steps and evaluations",
        answer=FileEnd,
        takes=PublishedSteps,
        query=AT,
        refusals=APPENDING,
    )
    async def _steps(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedSteps)
        now = time.time()
        lines = [
            metrics_fields(each["step"], each["metrics"], each.get("time", now))
            for each in body["steps"]
        ]
        return await self._append(request, "metrics", lines)

    @route(
        "POST",
        "/view/runs/{name}/trials",
        name="publish_trials",
        who=Who.ADMIN,
        summary="Appends finished trials, in steps that do not decrease",
        answer=FileEnd,
        takes=PublishedTrials,
        query=AT,
        refusals=APPENDING,
    )
    async def _trials(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedTrials)
        return await self._append(request, "trials", body["trials"])

    @route(
        "POST",
        "/view/runs/{name}/phases",
        name="publish_phases",
        who=Who.ADMIN,
        summary="Appends phases of the trainer that have ended",
        answer=FileEnd,
        takes=PublishedPhases,
        query=AT,
        refusals=APPENDING,
    )
    async def _phases(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedPhases)
        return await self._append(request, "phases", body["phases"])

    async def _append(
        self, request: web.Request, name: str, lines: Sequence[Mapping[str, Any]]
    ) -> web.Response:
        at = count(request, "at", 0, most=2**50, least=0) if "at" in request.query else None
        end = await asyncio.to_thread(self._run(request).append, name, lines, at)
        return answer(FileEnd(next=end))

    @route(
        "PUT",
        "/view/runs/{name}/tokens",
        name="publish_tokens",
        who=Who.ADMIN,
        summary="Writes the trained tokens of a step, in place of those that it has",
        answer=Nothing,
        takes=StepTokens,
        refusals=PUBLISHING,
    )
    async def _tokens(self, request: web.Request) -> web.Response:
        body = await self._body(request, StepTokens)
        await asyncio.to_thread(self._run(request).write_tokens, body)
        return answer({})

    @route(
        "PUT",
        "/view/runs/{name}/summary",
        name="publish_summary",
        who=Who.ADMIN,
        summary="Replaces the status and the evaluations of the run",
        answer=Nothing,
        takes=PublishedSummary,
        refusals=PUBLISHING,
    )
    async def _summary(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedSummary)
        await asyncio.to_thread(self._run(request).write_summary, body)
        return answer({})

    @route(
        "PUT",
        "/view/runs/{name}/now",
        name="publish_now",
        who=Who.ADMIN,
        summary="Replaces what the run does at this moment",
        answer=Nothing,
        takes=NowJson,
        refusals=PUBLISHING,
    )
    async def _now(self, request: web.Request) -> web.Response:
        body = await self._body(request, NowJson)
        await asyncio.to_thread(self._run(request).write_now, body)
        return answer({})

    @route(
        "DELETE",
        "/view/runs/{name}",
        name="publish_remove",
        who=Who.ADMIN,
        summary="Removes a published run",
        answer=Nothing,
        refusals=(403, 404, 503),
    )
    async def _remove(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._run(request).remove)
        return answer({})

    def _kept(self) -> PublishedRuns:
        if self._runs is None:
            raise SessionError(
                "this server keeps no published runs; start `agentic-proxy serve` with"
                " published_runs, a folder for them",
                status=404,
            )
        return self._runs

    def _run(self, request: web.Request) -> PublishedRun:
        return self._kept().run(request.match_info["name"])

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        """Raises RequestError for a body that is not of this typed dictionary."""
        raw = await read_body(request)
        try:
            return await asyncio.to_thread(adapter_of(kind).validate_json, raw, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "body"
            raise RequestError(f"{place[:200]}: {first['msg'][:200]}") from None
