"""The requests by which a trainer that is not ours publishes a run, for the administrator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from proxy.errors import RequestError, SessionError
from proxy.extras.view.access import Access
from proxy.extras.view.json_answer import ViewHandler, answer
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
from proxy.http.server import read_body
from proxy.run_files.lines import metrics_fields

T = TypeVar("T")


class PublishRequests:
    """`handlers` has one per route. All but the administrator are refused."""

    def __init__(self, access: Access, runs: PublishedRuns | None) -> None:
        """`runs`: where they are kept; None: nobody can publish."""
        self._access = access
        self._runs = runs
        self.handlers: dict[str, ViewHandler] = {
            "publish": self._begin,
            "publish/steps": self._steps,
            "publish/trials": self._trials,
            "publish/phases": self._phases,
            "publish/tokens": self._tokens,
            "publish/summary": self._summary,
            "publish/now": self._now,
            "publish/remove": self._remove,
        }

    async def _begin(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedConfig)
        name, last_step = request.match_info["name"], body.get("last_step")
        await asyncio.to_thread(self._kept().begin, name, body["config"], last_step)
        return answer({})

    async def _steps(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedSteps)
        now = time.time()
        lines = [
            metrics_fields(each["step"], each["metrics"], each.get("time", now))
            for each in body["steps"]
        ]
        return await self._append(request, "metrics", lines)

    async def _trials(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedTrials)
        return await self._append(request, "trials", body["trials"])

    async def _phases(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedPhases)
        return await self._append(request, "phases", body["phases"])

    async def _append(
        self, request: web.Request, name: str, lines: Sequence[Mapping[str, Any]]
    ) -> web.Response:
        at = count(request, "at", 0, most=2**50, least=0) if "at" in request.query else None
        end = await asyncio.to_thread(self._run(request).append, name, lines, at)
        return answer(FileEnd(next=end))

    async def _tokens(self, request: web.Request) -> web.Response:
        body = await self._body(request, StepTokens)
        await asyncio.to_thread(self._run(request).write_tokens, body)
        return answer({})

    async def _summary(self, request: web.Request) -> web.Response:
        body = await self._body(request, PublishedSummary)
        await asyncio.to_thread(self._run(request).write_summary, body)
        return answer({})

    async def _now(self, request: web.Request) -> web.Response:
        body = await self._body(request, NowJson)
        await asyncio.to_thread(self._run(request).write_now, body)
        return answer({})

    async def _remove(self, request: web.Request) -> web.Response:
        await self._check(request)
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
        await self._check(request)
        raw = await read_body(request)
        try:
            return await asyncio.to_thread(adapter_of(kind).validate_json, raw, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "body"
            raise RequestError(f"{place[:200]}: {first['msg'][:200]}") from None

    async def _check(self, request: web.Request) -> None:
        if not await self._access.may_save(request):
            raise SessionError(
                "a key for reading cannot publish; send the admin key as `Authorization: Bearer"
                " KEY`",
                status=403,
            )
