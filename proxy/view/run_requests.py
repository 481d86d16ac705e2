"""The requests of the page for training runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from proxy.errors import SessionError, StoreError
from proxy.record_format import mark_fields
from proxy.store.browser import Browser
from proxy.view.json_answer import HEADERS, ViewHandler, answer
from proxy.view.query import count, trial_filter
from proxy.view.run_folder import RecordedRun, RecordedRuns
from proxy.view.trace import trace_pieces


class RunRequests:
    """`handlers` has one per route."""

    def __init__(self, browser: Callable[[], Browser], runs: RecordedRuns) -> None:
        self._browser = browser
        self._runs = runs
        self.handlers: dict[str, ViewHandler] = {
            "run": self._run,
            "run/metrics": self._metrics,
            "run/trials": self._trials,
            "run/step": self._step,
            "run/trace": self._trace,
        }

    async def _run(self, request: web.Request) -> web.Response:
        return answer(await asyncio.to_thread(self._run_of(request).summary))

    async def _metrics(self, request: web.Request) -> web.Response:
        start = count(request, "from", 0, most=2**50, least=0)
        return answer(await asyncio.to_thread(self._run_of(request).metrics, start))

    async def _trials(self, request: web.Request) -> web.Response:
        run, where = self._run_of(request), trial_filter(request)
        before = count(request, "before", 0, most=2**50, least=0) or None
        limit = count(request, "limit", 50, most=200)
        found = await asyncio.to_thread(run.trials, where, before, limit)
        marks = await self._browser().marks([trial["trial_id"] for trial in found["trials"]])
        for trial in found["trials"]:
            trial["marks"] = [mark_fields(mark) for mark in marks.get(trial["trial_id"], ())]
        return answer(found)

    async def _step(self, request: web.Request) -> web.Response:
        step = count(request, "step", 0, most=2**31 - 1, least=0)
        return answer(await asyncio.to_thread(self._run_of(request).step, step))

    async def _trace(self, request: web.Request) -> web.StreamResponse:
        """The run as a file for Perfetto. If the store fails meanwhile, the connection breaks, so
        that nobody takes the beginning of the file for the whole."""
        run = self._run_of(request)
        response = web.StreamResponse(headers=HEADERS)
        response.content_type = "application/json"
        response.headers["Content-Disposition"] = 'attachment; filename="trace.json"'
        async with self._runs.browser_of(run, self._browser()) as browser:
            await response.prepare(request)
            try:
                async for piece in trace_pieces(run.path, browser):
                    await response.write(piece)
            except StoreError:
                if request.transport is not None:
                    request.transport.abort()
                return response
        await response.write_eof()
        return response

    def _run_of(self, request: web.Request) -> RecordedRun:
        name = request.query.get("run", "")
        if name not in self._runs:
            raise SessionError(f"there is no run {name[:80]!r}; `view RUN` shows one", status=404)
        return self._runs[name]
