"""The requests of the page, and who may make them.

Invariant: all of them but `log_in` need a cookie or a key (`access`), and change nothing in the
record but saved search rules, published runs, and what the administrator says of a session. All but
`run/trace`, which is sent while it is made, and `session/export`, which is one session, answer with
a bounded number of rows and characters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from proxy.errors import ProxyError, RequestError, SessionError
from proxy.extras.rules.rules import RuleConfig, rule_json, save_rule, saved_rules
from proxy.extras.view import pages
from proxy.extras.view.access import Access, Reader
from proxy.extras.view.answers import (
    DecisionsPage,
    ForksPage,
    HitsPage,
    NewsJson,
    RecordState,
    RuleName,
    RulesAnswer,
    Secret,
    SessionsPage,
    StateAnswer,
    StateJson,
)
from proxy.extras.view.curation_requests import CurationRequests
from proxy.extras.view.decisions import JOURNAL, decisions
from proxy.extras.view.json_answer import answer
from proxy.extras.view.live import LiveFeed, own_state
from proxy.extras.view.masking import Masking
from proxy.extras.view.parameters import COUNT, NUMBER, SET, TEXT, up_to
from proxy.extras.view.people import People
from proxy.extras.view.publish_requests import PublishRequests
from proxy.extras.view.query import choice, count, number
from proxy.extras.view.run_requests import RunRequests
from proxy.extras.view.runs import RecordedRuns
from proxy.extras.view.session_requests import SessionRequests
from proxy.extras.view.summaries import head_json
from proxy.http.openapi import Nothing
from proxy.http.route import Route, Who, add_routes, route, routes_of
from proxy.http.server import read_body
from proxy.person_keys import SCOPE, Scope
from proxy.records import ForkCause, SessionKind, SessionStatus
from proxy.rendering.tokenizer import Tokenizer
from proxy.search.record import LAST_PLACE, search
from proxy.search.terms import SearchTerms
from proxy.store.browser import Browser, SessionPage

MAX_RULE_BYTES = 16_384
_LOG_IN = (
    "log in: open the link that `serve` printed; programs send `Authorization: Bearer KEY` with the"
    " admin key or a key of `agentic-proxy view-key create`"
)

State = Callable[[], RecordState]
READER = web.RequestKey("reader", Reader)


class ViewApi:
    """The page's server side."""

    def __init__(
        self,
        browser: Callable[[], Browser],
        access: Access,
        state: State,
        tokenizer: Callable[[], Tokenizer | None],
        runs: RecordedRuns | None = None,
        *,
        curation: CurationRequests,
        rules: Sequence[RuleConfig] = (),
        masking: Masking | None = None,
    ) -> None:
        """`state`: what is shown besides the record, such as the engines. `runs`: training runs,
        of which the first one's sessions are in the store. `rules`: the configured ones.
        `masking`: what hides secrets (default: all are hidden)."""
        self._masking = masking = masking or Masking()
        self._browser = browser = _masked(browser, tokenizer, masking)
        self._access = access
        self._tokenizer = tokenizer
        self._runs = RecordedRuns() if runs is None else runs
        self._rules = rules
        self._people = People()
        self._record_state = state
        self._feed = LiveFeed(browser, self._state_for, lambda: masking.words(self._runs.ends()))
        self._owners = {
            type(owner): owner
            for owner in (
                self,
                pages.PageFiles(),
                SessionRequests(browser, self._runs, tokenizer, self._people, masking),
                curation,
                RunRequests(browser, self._runs, masking),
                PublishRequests(self._runs.published),
            )
        }
        """The objects whose methods are the handlers."""

    def close(self) -> None:
        """Ends the streams, so that the server can stop."""
        self._feed.close()

    async def serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        """The answer to a request of one of `ROUTES`."""
        try:
            await self._check(route, request)
            return await route.handler(self._owners[route.owner], request)
        except ProxyError as error:
            response = answer({"error": {"message": error.message}}, error.status)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = str(round(error.retry_after_s))
            return response

    async def _check(self, route: Route, request: web.Request) -> None:
        """Raises SessionError: the request may not use the route."""
        if route.who is Who.ANYONE:
            return
        reader = await self._access.reader(request)
        if reader is None:
            raise SessionError(_LOG_IN, status=401)
        if route.who is Who.ADMIN and not reader.edits:
            raise SessionError(
                "a link or a key for reading changes nothing: log in with the admin key, send it as"
                " `Authorization: Bearer KEY`, or open the page with `agentic-proxy view --edit`",
                status=403,
            )
        request[READER] = reader
        reader.scope.admit(route, request)

    @route(
        "POST",
        "/view/log_in",
        who=Who.ANYONE,
        summary="Exchanges a secret for a cookie of this browser",
        answer=Nothing,
        takes=Secret,
        refusals=(400, 401, 503),
    )
    async def _log_in(self, request: web.Request) -> web.Response:
        try:
            secret = orjson.loads(await read_body(request))["secret"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise RequestError('send {"secret": "…"}') from None
        cookie = await self._access.log_in(secret) if isinstance(secret, str) else None
        if cookie is None:
            raise SessionError(
                "this link or key does not open the page: a link works once, within minutes; start"
                " what printed it again, or make a key in this page's store, `agentic-proxy"
                " view-key create NAME --store URL`; a proxy's page opens with its admin key, too",
                status=401,
            )
        response = answer({})
        self._access.set_cookie(request, response, cookie)
        return response

    @route(
        "POST",
        "/view/log_out",
        who=Who.READER,
        summary="Ends the cookie",
        own=True,
        answer=Nothing,
        refusals=(503,),
    )
    async def _log_out(self, request: web.Request) -> web.Response:
        await self._access.log_out(request)
        return answer({})

    @route(
        "GET",
        "/view/live",
        who=Who.READER,
        summary="What happens from now on, or after the position `after` (also `Last-Event-ID`),"
        " which each event has as its id",
        own=True,
        query={"after": TEXT},
        refusals=(429,),
        events={"message": NewsJson, "state": StateJson},
    )
    async def _live(self, request: web.Request) -> web.StreamResponse:
        scope = request[SCOPE]

        async def may_read() -> bool:
            reader = await self._access.reader(request)
            return reader is not None and reader.scope == scope

        return await self._feed.stream(request, scope, may_read)

    @route(
        "GET",
        "/view/state",
        who=Who.READER,
        summary="The engines, and the runs that are shown",
        own=True,
        answer=StateAnswer,
    )
    async def _state(self, request: web.Request) -> web.Response:
        state = self._state_for(request[SCOPE])
        has_tokenizer = self._tokenizer() is not None
        may_edit = request[READER].edits
        return answer(StateAnswer(**state, tokenizer=has_tokenizer, may_edit=may_edit))

    def _state_for(self, scope: Scope) -> StateJson:
        state = StateJson(**self._record_state(), runs=self._runs.state())
        return self._masking.words(own_state(state, scope) if scope.person else state)

    @route(
        "GET",
        "/view/sessions",
        who=Who.READER,
        summary="Sessions, the newest first",
        own=True,
        answer=SessionsPage,
        query={
            "status": {"enum": ["", *SessionStatus]},
            "kind": {"enum": ["", *SessionKind]},
            "prefix": TEXT,
            "marked": TEXT,
            "before": TEXT,
            "limit": up_to(200),
        },
        refusals=(400, 503),
    )
    async def _sessions(self, request: web.Request) -> web.Response:
        query = request.query
        before = None
        if "before" in query:
            at, _, last_id = query["before"].partition(",")
            before = (number(at, "before"), last_id)
        prefix = request[SCOPE].narrowed(query.get("prefix", ""))
        if prefix is None:
            return answer(SessionsPage(sessions=[], next=None))
        page = SessionPage(
            status=choice(query.get("status"), SessionStatus),
            kind=choice(query.get("kind"), SessionKind),
            id_prefix=prefix,
            marked=query.get("marked") or None,
            before=before,
            limit=count(request, "limit", 50, most=200),
        )
        found = await self._browser().sessions(page)
        more = len(found) == page.limit
        last = found[-1].session if found else None
        after = f"{last.created_at!r},{last.session_id}" if more and last else None
        sessions = await self._people.of(self._browser(), found)
        return answer(SessionsPage(sessions=sessions, next=after))

    @route(
        "GET",
        "/view/decisions",
        who=Who.READER,
        summary="What the learner of a policy has decided, the newest first",
        own=True,
        answer=DecisionsPage,
        query={"policy": TEXT, "before": COUNT, "limit": up_to(200)},
        needs=("policy",),
        refusals=(400, 404),
    )
    async def _decisions(self, request: web.Request) -> web.Response:
        named = request.query.get("policy", "")
        state = self._state_for(request[SCOPE])
        learners = {each["policy"]: each for each in state["learners"]}
        if named not in learners:
            raise RequestError(f"policy {named[:80]!r}: no learner has it", status=404)
        before = request.query.get("before")
        at = None if before is None else count(request, "before", 0, most=2**62, least=0)
        journal = Path(learners[named]["folder"]) / JOURNAL
        page = await asyncio.to_thread(
            decisions, journal, at, count(request, "limit", 50, most=200)
        )
        return answer(self._masking.words(page))

    @route(
        "GET",
        "/view/forks",
        who=Who.READER,
        summary="The turns of all sessions that fork, for a cause or any, the newest first",
        own=True,
        answer=ForksPage,
        query={"cause": {"enum": ["", *ForkCause]}, "before": NUMBER, "limit": up_to(200)},
        refusals=(400, 503),
    )
    async def _forks(self, request: web.Request) -> web.Response:
        cause = choice(request.query.get("cause", ""), ForkCause)
        before = number(request.query.get("before", str(time.time() + 1)), "before")
        limit = count(request, "limit", 50, most=200)
        browser = self._browser()
        causes = [*ForkCause] if cause is None else [cause]
        each = await asyncio.gather(*(browser.forks(one, before, limit) for one in causes))
        found = sorted(chain(*each), key=lambda head: -head.started_at)[:limit]
        more = found[-1].started_at if len(found) == limit else None
        own = [head_json(head) for head in found if request[SCOPE].has(head.session_id)]
        return answer(ForksPage(turns=own, next=more))

    @route(
        "GET",
        "/view/search",
        who=Who.READER,
        summary="The turns that match, from the newest to the oldest, of those that one request"
        " reads",
        own=True,
        answer=HitsPage,
        query={
            "text": TEXT,
            "regex": TEXT,
            "tool": TEXT,
            "cause": {"enum": ["", *ForkCause]},
            "edits_tests": SET,
            "answers_only": SET,
            "before": COUNT,
        },
        refusals=(400, 503),
    )
    async def _search(self, request: web.Request) -> web.Response:
        query = request.query
        terms = SearchTerms.of(
            query.get("text", ""),
            query.get("regex", ""),
            query.get("tool", ""),
            choice(query.get("cause"), ForkCause),
            edits_tests=bool(query.get("edits_tests")),
            answers_only=bool(query.get("answers_only")),
        )
        before = count(request, "before", LAST_PLACE, most=LAST_PLACE)
        hits, read, older = await search(self._browser(), terms, before, request[SCOPE])
        return answer(HitsPage(hits=hits, read=read, next=older))

    @route(
        "GET",
        "/view/rules",
        name="rules",
        who=Who.READER,
        summary="The search rules",
        answer=RulesAnswer,
        refusals=(503,),
    )
    async def _show_rules(self, request: web.Request) -> web.Response:
        configured = [rule_json(rule, configured=True) for rule in self._rules]
        saved = [rule_json(rule) for rule in await saved_rules(self._browser())]
        may_save = request[READER].edits
        return answer(RulesAnswer(rules=[*configured, *saved], may_save=may_save))

    @route(
        "POST",
        "/view/rules",
        name="rules_save",
        who=Who.ADMIN,
        summary="Saves a rule that marks sessions; for the administrator",
        answer=Nothing,
        takes=RuleConfig,
        refusals=(400, 403, 409, 503),
    )
    async def _save_rule(self, request: web.Request) -> web.Response:
        await save_rule(self._browser(), await self._given(request))
        return answer({})

    @route(
        "POST",
        "/view/rules/remove",
        name="rules_remove",
        who=Who.ADMIN,
        summary="Removes a saved rule; for the administrator",
        answer=Nothing,
        takes=RuleName,
        refusals=(400, 403, 404, 503),
    )
    async def _remove_rule(self, request: web.Request) -> web.Response:
        name = (await self._given(request)).get("name")
        if not isinstance(name, str) or not await self._browser().remove_rule(name):
            raise RequestError("name: no saved rule has this name", status=404)
        return answer({})

    async def _given(self, request: web.Request) -> dict[str, Any]:
        """The body of a request to save or to remove a rule."""
        body = await read_body(request)
        try:
            given = orjson.loads(body[:MAX_RULE_BYTES])
        except orjson.JSONDecodeError:
            raise RequestError("send a JSON object with a rule's name and query") from None
        if not isinstance(given, dict):
            raise RequestError("send a JSON object with a rule's name and query")
        return given


def _masked(
    browser: Callable[[], Browser], tokenizer: Callable[[], Tokenizer | None], masking: Masking
) -> Callable[[], Browser]:
    return lambda: masking.of(browser(), tokenizer())


PAGE = "/"
ROUTES = routes_of(
    pages.PageFiles,
    ViewApi,
    SessionRequests,
    CurationRequests,
    RunRequests,
    PublishRequests,
)
"""Of the page, with its files."""


def add_page(app: web.Application, api: Callable[[], ViewApi]) -> None:
    """Adds the page and its requests to an application."""

    async def serve(route: Route, request: web.Request) -> web.StreamResponse:
        return await api().serve(route, request)

    add_routes(app, ROUTES, serve)
