"""The requests of the page for training runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web

from proxy.errors import SessionError, StoreError
from proxy.extras.view.json_answer import ALONE, HEADERS, answer
from proxy.extras.view.masking import Masking, unmasked
from proxy.extras.view.parameters import COUNT, NUMBER, RUN, SESSION, SET, TEXT, up_to
from proxy.extras.view.query import count, session_id, trial_filter
from proxy.extras.view.run_answers import (
    MetricsPage,
    RunJson,
    StepTrials,
    TraceFile,
    TrialJson,
    TrialOfRun,
    TrialsPage,
)
from proxy.extras.view.run_folder import RecordedRun
from proxy.extras.view.runs import RecordedRuns
from proxy.extras.view.trace import trace_pieces
from proxy.http.route import Who, route
from proxy.records.binary import MarkFields, mark_fields
from proxy.run_files.trial_files import AGENT_FILES, VERIFIER_FILES, FilePiece
from proxy.store.browser import Browser

PIECE_TRIALS = 50_000
"""More trials than a piece of the file has: all of it is searched for marked ones."""
SHOWN_FILES = (*VERIFIER_FILES, *AGENT_FILES)
MARKED_TRIALS = 500
"""Trials whose marks are read at a time, by the store's index."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class RunRequests:
    """The handlers of a run."""

    def __init__(
        self, browser: Callable[[], Browser], runs: RecordedRuns, masking: Masking | None = None
    ) -> None:
        self._browser = browser
        self._runs = runs
        self._masking = masking or Masking()

    @route(
        "GET",
        "/view/run",
        who=Who.READER,
        summary="A run at a glance",
        answer=RunJson,
        query=RUN,
        needs=("run",),
        refusals=(404,),
    )
    async def _run(self, request: web.Request) -> web.Response:
        summary = await asyncio.to_thread(self._run_of(request).summary)
        return answer(self._masking.words(summary))

    @route(
        "GET",
        "/view/run/metrics",
        name="run_metrics",
        who=Who.READER,
        summary="The metrics of a run, read on from the byte `from`",
        answer=MetricsPage,
        query={**RUN, "from": COUNT},
        needs=("run",),
        refusals=(400, 404),
    )
    async def _metrics(self, request: web.Request) -> web.Response:
        start = count(request, "from", 0, most=2**50, least=0)
        return answer(await asyncio.to_thread(self._run_of(request).metrics, start))

    @route(
        "GET",
        "/view/run/trials",
        name="run_trials",
        who=Who.READER,
        summary="The trials of a run, the latest first",
        answer=TrialsPage,
        query={
            **RUN,
            **dict.fromkeys(("kind", "status", "source", "task", "text", "marked"), TEXT),
            **dict.fromkeys(("min_reward", "max_reward"), NUMBER),
            "min_tokens": COUNT,
            "errors": SET,
            "before": COUNT,
            "limit": up_to(200),
        },
        needs=("run",),
        refusals=(400, 404, 503),
    )
    async def _trials(self, request: web.Request) -> web.Response:
        run, where = self._run_of(request), trial_filter(request)
        before = count(request, "before", 0, most=2**50, least=0) or None
        limit = count(request, "limit", 50, most=200)
        rule = request.query.get("marked", "")
        most = PIECE_TRIALS if rule else limit
        found, end = await asyncio.to_thread(run.trials, where, before, most)
        trials: list[TrialJson] = []
        async with self._store_of(run) as browser:
            for batch in _batches(found):
                named = [trial["trial_id"] for _, trial in batch]
                marks = await _marks(browser, named, needed=bool(rule))
                for at, trial in batch:
                    trial = await self._shown(browser, run, trial)
                    trial["marks"] = marks.get(str(trial["trial_id"]), [])
                    if not rule or any(rule in ("*", mark["rule"]) for mark in trial["marks"]):
                        trials.append(trial)
                        if len(trials) == limit:
                            return answer(TrialsPage(trials=trials, next=at or None))
        return answer(TrialsPage(trials=trials, next=end))

    @route(
        "GET",
        "/view/run/step",
        name="run_step",
        who=Who.READER,
        summary="The trials of a step",
        answer=StepTrials,
        query={**RUN, "step": COUNT, "kind": TEXT, "group": TEXT},
        needs=("run",),
        refusals=(400, 404),
    )
    async def _step(self, request: web.Request) -> web.Response:
        step = count(request, "step", 0, most=2**31 - 1, least=0)
        run = self._run_of(request)
        kind, group = request.query.get("kind", ""), request.query.get("group", "")
        found = await asyncio.to_thread(run.step, step, kind, group)
        async with self._store_of(run) as browser:
            found["trials"] = [await self._shown(browser, run, each) for each in found["trials"]]
        return answer(found)

    @route(
        "GET",
        "/view/run/trial",
        name="run_trial",
        who=Who.READER,
        summary="What a run knows of a session: how its trial ended, its log, and what its verifier"
        " wrote",
        answer=TrialOfRun,
        query=SESSION,
        needs=("session",),
        refusals=(404,),
    )
    async def _trial(self, request: web.Request) -> web.Response:
        runs = self._runs.with_session(request.query.get("run", ""))
        named = session_id(request)
        found = await asyncio.to_thread(_trial_of, runs, named)
        return answer(await self._pieces(runs, named, found))

    @route(
        "GET",
        "/view/run/file",
        name="run_file",
        who=Who.READER,
        summary="A piece of one of these files, which ends at the byte `before`",
        answer=FilePiece,
        query={**SESSION, "name": TEXT, "before": COUNT},
        needs=("session", "name", "before"),
        refusals=(400, 404),
    )
    async def _file(self, request: web.Request) -> web.Response:
        """A piece of a trial's file, before the byte `before`."""
        runs = self._runs.with_session(request.query.get("run", ""))
        session, name = session_id(request), request.query.get("name", "")
        before = count(request, "before", 0, most=2**50, least=0)
        for run in runs:
            piece = await asyncio.to_thread(run.files(session).before, name, before)
            if piece is not None:
                return answer(await self._pieces([run], session, piece))
        raise SessionError(f"the trial has no file {name[:80]!r}", status=404)

    @route(
        "GET",
        "/view/run/trace",
        name="run_trace",
        who=Who.READER,
        summary="The run as a file for Perfetto",
        answer=TraceFile,
        query=RUN,
        needs=("run",),
        refusals=(404,),
    )
    async def _trace(self, request: web.Request) -> web.StreamResponse:
        """The run as a file for Perfetto. If the store fails meanwhile, the connection breaks, so
        that nobody takes the beginning of the file for the whole."""
        run = self._run_of(request)
        response = web.StreamResponse(headers=HEADERS)
        response.content_type = "application/json"
        response.headers["Content-Disposition"] = 'attachment; filename="trace.json"'
        async with self._runs.browser_of(run, unmasked(self._browser())) as browser:
            await response.prepare(request)
            try:
                async for piece in trace_pieces(run.path, browser, self._masking.words):
                    await response.write(piece)
            except StoreError:
                if request.transport is not None:
                    request.transport.abort()
                return response
        await response.write_eof()
        return response

    @route(
        "GET",
        "/view/run/report",
        name="run_report",
        who=Who.READER,
        summary="The report of a run, to be saved",
        query=RUN,
        needs=("run",),
        other_types=("text/html",),
        refusals=(404,),
    )
    async def _report(self, request: web.Request) -> web.Response:
        """A file to be saved: opened here, what a foreign run's report has would be the page's."""
        found = await asyncio.to_thread(self._run_of(request).report)
        if found is None:
            raise SessionError("the run has no report; `agentic-train report RUN`", status=404)
        saved = {"Content-Disposition": 'attachment; filename="report.html"', **ALONE}
        return web.Response(body=found, content_type="text/html", headers=HEADERS | saved)

    @asynccontextmanager
    async def _store_of(self, run: RecordedRun) -> AsyncIterator[Browser | None]:
        """Reads the sessions of a run without their secrets."""
        async with self._runs.browser_of(run, self._browser()) as browser:
            yield browser and self._masking.of(browser, None, run.name)

    async def _pieces(self, runs: Sequence[RecordedRun], session: str, value: T) -> T:
        """Texts of a trial's files without the secrets of its session."""
        for run in runs:
            async with self._store_of(run) as browser:
                if browser is not None:
                    return await self._masking.pieces(browser, session, value)
        return await self._masking.pieces(None, session, value)

    async def _shown(
        self, browser: Browser | None, run: RecordedRun, trial: TrialJson
    ) -> TrialJson:
        """A trial without the secrets that its error may quote."""
        if not trial["error"]:
            return trial
        return await self._masking.pieces(browser, str(trial["trial_id"]), trial)

    def _run_of(self, request: web.Request) -> RecordedRun:
        return self._runs.named(request.query.get("run", ""))


def _trial_of(runs: Sequence[RecordedRun], session: str) -> TrialOfRun:
    for run in runs:
        trial, files = run.trial(session), run.files(session).ends(SHOWN_FILES)
        if trial is not None or files:
            return {"run": run.name, "trial": trial, "files": files}
    return {"run": None, "trial": None, "files": []}


def _batches(found: Sequence[tuple[int, TrialJson]]) -> Iterator[Sequence[tuple[int, TrialJson]]]:
    for start in range(0, len(found), MARKED_TRIALS):
        yield found[start : start + MARKED_TRIALS]


async def _marks(
    browser: Browser | None, trial_ids: Sequence[str | None], needed: bool
) -> dict[str, list[MarkFields]]:
    """The marks of those of the sessions that have any. `browser`: None if the run has none.

    Raises:
        StoreError: the store cannot be read, and the marks are `needed`; else there are none.
    """
    if browser is None:
        return {}
    try:
        found = await browser.marks([each for each in trial_ids if each])
    except StoreError as error:
        if needed:
            raise
        _log.warning("trials are shown without their marks: %s", error.message)
        return {}
    return {each: [mark_fields(mark) for mark in marks] for each, marks in found.items()}
