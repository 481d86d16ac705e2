"""A route of the control plane or of the page is declared once: at its handler.

From the declaration follow the routing (`add_routes`), who may call it (`who`, which the door of
the control plane and that of the page check before the handler runs), its part of the OpenAPI
document (`proxy.http.openapi`) and its row in the table of the docs (`table`).

Example:
    class Colours:
        @route("PUT", "/colours/{name}", summary="Sets a colour", answer=Nothing, takes=Colour)
        async def _set(self, request: web.Request) -> web.Response: ...

    add_routes(app, routes_of(Colours), serve)
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self, TypeVar

from aiohttp import web

from proxy.errors import RequestError
from proxy.http.server import answer_expect

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PARAMETER = re.compile(r"\{(\w+)[^}]*\}")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_DECLARED = "declared_routes"


class Who(Enum):
    """Who may call a route, as the docs say it."""

    ADMIN = "the admin key"
    SCRAPER = "the admin key, or one of `metrics_key_file`"
    READER = "a reader of the page"
    WORKER = "a worker of the relay, by its token"
    LEARNER = "a learner, by its key"
    ANYONE = "anyone"


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """One method and path. Bodies are pydantic models, or typed dictionaries that the handler
    returns."""

    method: str
    path: str
    """With aiohttp's parameters: `/sessions/{trial_id}`."""
    name: str
    """What the handler does, in the audit log."""
    operation_id: str
    """In the OpenAPI document: the name, and the parameters of a further path of the handler."""
    handler: Callable[[Any, web.Request], Awaitable[web.StreamResponse]]
    """A method of `owner`."""
    owner: type
    summary: str
    who: Who = Who.ADMIN
    answer: type | None = None
    takes: type | None = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """The parameters of `query` that must be given."""
    other_types: tuple[str, ...] = ()
    """Content types that are sent if `Accept` names them (always, if there is no `answer`)."""
    events: Mapping[str, type] = field(default_factory=dict)
    """What the data of server-sent events are, by the name of the event."""
    documented: bool = True
    """Whether the OpenAPI document has it."""
    everywhere: bool = False
    """Whether the other processes of the proxy get the same request."""
    own: bool = False
    """Whether a person's key opens it, for own sessions (`proxy.person_keys`): the one that the
    path or the query names, which the door checks, or those that the handler selects."""

    @classmethod
    def missing(cls, path: str, words: str) -> Self:
        """A route that refuses every request: what would answer it is off. `words` say how to
        switch it on."""

        async def refuse(_: object, request: web.Request) -> web.StreamResponse:
            raise RequestError(words, status=409)

        return cls("*", path, "missing", "missing", refuse, object, words)

    @property
    def plain_path(self) -> str:
        """The path without the patterns of its parameters."""
        return _PARAMETER.sub(r"{\1}", self.path)

    @property
    def parameters(self) -> list[str]:
        """The names in the path."""
        return _PARAMETER.findall(self.path)


def route(
    method: str, *paths: str, summary: str, name: str | None = None, **more: Any
) -> Callable[[_Method], _Method]:
    """Declares that a method handles requests to these paths; `more` are fields of `Route`. The
    default of `name` is the method's, without its underscore."""

    def declare(handler: _Method) -> _Method:
        said = name or handler.__name__.lstrip("_")
        declared = [
            Route(
                method,
                path,
                said,
                "_".join([said, *(_PARAMETER.findall(path) if path != paths[0] else [])]),
                handler,
                object,
                summary,
                **more,
            )
            for path in paths
        ]
        setattr(handler, _DECLARED, declared)
        return handler

    return declare


def routes_of(*owners: type) -> tuple[Route, ...]:
    """What the methods of these classes handle, in the order in which they are written."""
    return tuple(
        replace(each, owner=owner)
        for owner in owners
        for handler in vars(owner).values()
        for each in getattr(handler, _DECLARED, ())
    )


def add_routes(
    app: web.Application,
    routes: Iterable[Route],
    serve: Callable[[Route, web.Request], Awaitable[web.StreamResponse]],
) -> None:
    """`serve` answers a request to a route. A path with more fixed text goes first, because a
    parameter may match slashes: `/sessions/{id}/events` before `/sessions/{id}`."""
    for each in sorted(routes, key=lambda each: -len(_PARAMETER.sub("", each.path))):
        app.router.add_route(
            each.method, each.path, _handler(each, serve), expect_handler=answer_expect
        )


def _handler(
    each: Route, serve: Callable[[Route, web.Request], Awaitable[web.StreamResponse]]
) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await serve(each, request)

    return handle


def table(routes: Iterable[Route]) -> str:
    """The routes as a table in Markdown."""
    rows = [f"| `{r.method} {r.plain_path}` | {_who(r)} | {r.summary} |" for r in routes]
    return "\n".join(["| request | who | what |", "|---|---|---|", *rows])


def _who(route: Route) -> str:
    return f"{route.who.value}; a person, for own sessions" if route.own else route.who.value
