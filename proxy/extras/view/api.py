"""The requests of the page: one handler per entry of `ROUTES`, which `operations` describes.

Invariant: all of them but `log_in` need a cookie or a key (`access`), and change nothing in the
record but saved search rules and published runs. All but `run/trace`, which is sent while it is
made, answer with a bounded number of rows and characters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import orjson
from aiohttp import web

from proxy.errors import ProxyError, RequestError, SessionError
from proxy.extras.rules.rules import RuleConfig, rule_json, save_rule, saved_rules
from proxy.extras.rules.terms import SearchTerms
from proxy.extras.view import pages
from proxy.extras.view.access import Access
from proxy.extras.view.answers import (
    ForksPage,
    HitsPage,
    RecordState,
    RulesAnswer,
    SessionsPage,
    StateAnswer,
    StateJson,
)
from proxy.extras.view.json_answer import ViewHandler, answer
from proxy.extras.view.live import LiveFeed
from proxy.extras.view.publish_requests import PublishRequests
from proxy.extras.view.query import choice, count, number
from proxy.extras.view.run_requests import RunRequests
from proxy.extras.view.runs import RecordedRuns
from proxy.extras.view.session_requests import SessionRequests
from proxy.extras.view.summaries import head_json, summary_json
from proxy.http.server import answer_expect, read_body
from proxy.records import ForkCause, SessionKind, SessionStatus
from proxy.rendering.tokenizer import Tokenizer
from proxy.store.browser import Browser, SessionPage

TURNS = 500
"""Turns that one request of a search reads."""
READ_BYTES = 8 * 2**20
"""Bytes of requests and answers that one request reads, or one turn if that is longer."""
MAX_RULE_BYTES = 16_384
LAST_PLACE = 2**62
"""A place after all turns of a store."""
_LOG_IN = (
    "log in: open the link that `serve` printed; programs send `Authorization: Bearer KEY` with the"
    " admin key or a key of `agentic-proxy view-key create`"
)

State = Callable[[], RecordState]


class ViewApi:
    """The page's server side."""

    def __init__(
        self,
        browser: Callable[[], Browser],
        access: Access,
        state: State,
        tokenizer: Callable[[], Tokenizer | None],
        runs: RecordedRuns | None = None,
        rules: Sequence[RuleConfig] = (),
    ) -> None:
        """`state`: what is shown besides the record, such as the engines. `runs`: training runs,
        of which the first one's sessions are in the store. `rules`: the configured ones."""
        self._browser = browser
        self._access = access
        self._tokenizer = tokenizer
        self._runs = RecordedRuns() if runs is None else runs
        self._rules = rules
        self._record_state = state
        self._feed = LiveFeed(browser, self._whole_state)
        self._handlers: dict[str, ViewHandler] = {
            "log_in": self._log_in,
            "log_out": self._log_out,
            "live": self._live,
            "state": self._state,
            "sessions": self._sessions,
            "forks": self._forks,
            "search": self._search,
            "rules": self._show_rules,
            "rules/save": self._save_rule,
            "rules/remove": self._remove_rule,
            **SessionRequests(browser, self._runs, tokenizer).handlers,
            **RunRequests(browser, self._runs).handlers,
            **PublishRequests(access, self._runs.published).handlers,
        }

    def close(self) -> None:
        """Ends the streams, so that the server can stop."""
        self._feed.close()

    async def handle(self, name: str, request: web.Request) -> web.StreamResponse:
        """Runs the handler of a route in `ROUTES`."""
        try:
            if name != "log_in" and not await self._access.allows(request):
                raise SessionError(_LOG_IN, status=401)
            return await self._handlers[name](request)
        except ProxyError as error:
            response = answer({"error": {"message": error.message}}, error.status)
            if error.retry_after_s is not None:
                response.headers["Retry-After"] = str(round(error.retry_after_s))
            return response

    async def _log_in(self, request: web.Request) -> web.Response:
        try:
            secret = orjson.loads(await read_body(request))["secret"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise RequestError('send {"secret": "…"}') from None
        cookie = await self._access.log_in(secret) if isinstance(secret, str) else None
        if cookie is None:
            raise SessionError(
                "this link or key does not open the page: a link works once, within a day; make a"
                " key with `agentic-proxy view-key create NAME`, or give the admin key",
                status=401,
            )
        response = answer({})
        self._access.set_cookie(request, response, cookie)
        return response

    async def _log_out(self, request: web.Request) -> web.Response:
        await self._access.log_out(request)
        return answer({})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        return await self._feed.stream(request, lambda: self._access.allows(request))

    async def _state(self, request: web.Request) -> web.Response:
        state = StateAnswer(**self._whole_state(), tokenizer=self._tokenizer() is not None)
        return answer(state)

    def _whole_state(self) -> StateJson:
        return StateJson(**self._record_state(), runs=self._runs.state())

    async def _sessions(self, request: web.Request) -> web.Response:
        query = request.query
        before = None
        if "before" in query:
            at, _, last_id = query["before"].partition(",")
            before = (number(at, "before"), last_id)
        page = SessionPage(
            status=choice(query.get("status"), SessionStatus),
            kind=choice(query.get("kind"), SessionKind),
            id_prefix=query.get("prefix", ""),
            marked=query.get("marked") or None,
            before=before,
            limit=count(request, "limit", 50, most=200),
        )
        found = await self._browser().sessions(page)
        more = len(found) == page.limit
        last = found[-1].session if found else None
        after = f"{last.created_at!r},{last.session_id}" if more and last else None
        return answer(SessionsPage(sessions=[summary_json(each) for each in found], next=after))

    async def _forks(self, request: web.Request) -> web.Response:
        cause = choice(request.query.get("cause", ""), ForkCause)
        before = number(request.query.get("before", str(time.time() + 1)), "before")
        limit = count(request, "limit", 50, most=200)
        browser = self._browser()
        causes = [*ForkCause] if cause is None else [cause]
        each = await asyncio.gather(*(browser.forks(one, before, limit) for one in causes))
        found = sorted(chain(*each), key=lambda head: -head.started_at)[:limit]
        more = found[-1].started_at if len(found) == limit else None
        return answer(ForksPage(turns=[head_json(head) for head in found], next=more))

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
        turns = await self._browser().written(before, TURNS, READ_BYTES)
        hits = await asyncio.to_thread(terms.hits, turns)
        older = turns[-1].place if turns and turns[-1].place > 1 else None
        return answer(HitsPage(hits=hits, read=len(turns), next=older))

    async def _show_rules(self, request: web.Request) -> web.Response:
        configured = [rule_json(rule, configured=True) for rule in self._rules]
        saved = [rule_json(rule) for rule in await saved_rules(self._browser())]
        may_save = await self._access.may_save(request)
        return answer(RulesAnswer(rules=[*configured, *saved], may_save=may_save))

    async def _save_rule(self, request: web.Request) -> web.Response:
        await save_rule(self._browser(), await self._given(request))
        return answer({})

    async def _remove_rule(self, request: web.Request) -> web.Response:
        name = (await self._given(request)).get("name")
        if not isinstance(name, str) or not await self._browser().remove_rule(name):
            raise RequestError("name: no saved rule has this name", status=404)
        return answer({})

    async def _given(self, request: web.Request) -> dict[str, Any]:
        """The body of a request that only the administrator may make."""
        if not await self._access.may_save(request):
            raise SessionError(
                "a key for reading cannot save rules; log in with the admin key", status=403
            )
        body = await read_body(request)
        try:
            given = orjson.loads(body[:MAX_RULE_BYTES])
        except orjson.JSONDecodeError:
            raise RequestError("send a JSON object with a rule's name and query") from None
        if not isinstance(given, dict):
            raise RequestError("send a JSON object with a rule's name and query")
        return given


PAGE = "/"
_FILES = {"page": pages.page, "static": pages.static}
ROUTES = (
    ("GET", PAGE, "page"),
    ("GET", "/view/static/{name:[a-z0-9_./-]+}", "static"),
    ("POST", "/view/log_in", "log_in"),
    ("POST", "/view/log_out", "log_out"),
    ("GET", "/view/live", "live"),
    ("GET", "/view/state", "state"),
    ("GET", "/view/sessions", "sessions"),
    ("GET", "/view/session", "session"),
    ("GET", "/view/heads", "heads"),
    ("GET", "/view/turns", "turns"),
    ("GET", "/view/text", "text"),
    ("GET", "/view/fork", "fork"),
    ("GET", "/view/forks", "forks"),
    ("GET", "/view/tokens", "tokens"),
    ("GET", "/view/search", "search"),
    ("GET", "/view/rules", "rules"),
    ("POST", "/view/rules", "rules/save"),
    ("POST", "/view/rules/remove", "rules/remove"),
    ("GET", "/view/run", "run"),
    ("GET", "/view/run/metrics", "run/metrics"),
    ("GET", "/view/run/trials", "run/trials"),
    ("GET", "/view/run/step", "run/step"),
    ("GET", "/view/run/trial", "run/trial"),
    ("GET", "/view/run/file", "run/file"),
    ("GET", "/view/run/trace", "run/trace"),
    ("PUT", "/view/runs/{name}", "publish"),
    ("POST", "/view/runs/{name}/steps", "publish/steps"),
    ("POST", "/view/runs/{name}/trials", "publish/trials"),
    ("POST", "/view/runs/{name}/phases", "publish/phases"),
    ("PUT", "/view/runs/{name}/tokens", "publish/tokens"),
    ("PUT", "/view/runs/{name}/summary", "publish/summary"),
    ("PUT", "/view/runs/{name}/now", "publish/now"),
    ("DELETE", "/view/runs/{name}", "publish/remove"),
)


def add_routes(app: web.Application, api: Callable[[], ViewApi]) -> None:
    """Adds the page and its requests to an application."""

    def route(name: str) -> ViewHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await api().handle(name, request)

        return handle

    for method, path, name in ROUTES:
        handler = _FILES.get(name) or route(name)
        app.router.add_route(method, path, handler, expect_handler=answer_expect)
