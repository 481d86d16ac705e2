"""Protects an HTTP server from requests by web pages, as one aiohttp middleware.

A web page that is open on a machine can send requests to every server that the machine can reach.
The guard refuses such requests before any handler gets them:

    Host             must be this server's bound address or one of `allowed_hosts` → 403
    Origin           must be this server's own, if a browser sends it → 403
    Sec-Fetch-Site   must be `same-origin` or `none`, if a browser sends it → 403
    Content-Type     must be `application/json` on routes that change state → 415
    credentials      must be UTF-8 → 401 (other headers, and the path → 400)

Health probes may have any Host. The page that people open (`pages`) may be opened by a link on
another site: a navigation of a whole tab, which brings nothing from that site and shows nothing to
it. For requests over a Unix socket, which browsers cannot send, only the encoding is checked.
harbor_sdk has a copy of these rules, because it imports no other package.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

PROBES = frozenset({"/health", "/ready"})
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})
"""Bind addresses that mean every interface."""

_CREDENTIALS = frozenset({"authorization", "x-api-key", "x-episode-key"})
_CHANGING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_WITHOUT_PREFLIGHT = frozenset(
    {"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"}
)
_OWN_SITE = frozenset({"same-origin", "none"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """The guard refuses a request: HTTP status, code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Hosts:
    """The names and addresses by which clients may call a server.

    A server on loopback may be called as `localhost` or by a loopback address. A server on every
    interface may be called by any IP address, as `localhost` or by this machine's name, because an
    attacker can only point a DNS name at it. All other names must be in `allowed`; `*.example.org`
    allows all names below it, `*` allows any name.

    Example: Hosts("0.0.0.0", ["proxy", "*.svc.cluster.local"]).includes("proxy:8000")  # True
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        self._bound = _name(bound)
        names = {_name(each) for each in allowed}
        self._is_open = "*" in names
        self._below = tuple(name[1:] for name in names if name.startswith("*."))
        self._names = names | {self._bound}
        if self._bound in EVERYWHERE:
            self._names |= {"localhost", socket.gethostname().lower()}
        elif _is_loopback(self._bound):
            self._names.add("localhost")

    def includes(self, host: str) -> bool:
        """`host` is the header's value: a name or an address, with or without a port."""
        name = _name(host)
        if self._is_open or name in self._names or name.endswith(self._below):
            return True
        if self._bound in EVERYWHERE:
            return _is_address(name)
        return _is_loopback(self._bound) and name != "localhost" and _is_loopback(name)


def web_guard(
    hosts: Hosts,
    *,
    needs_json: Callable[[web.Request], bool] = lambda _: True,
    pages: Collection[str] = (),
) -> Middleware:
    """The middleware. `needs_json` decides whether a request that changes state must be JSON.
    `pages` are the paths that other sites may link to."""

    def check_source(request: web.Request) -> None:
        if request.path not in PROBES:
            _check_host(request, hosts)
        if not (request.path in pages and _is_navigation(request)):
            _check_browser(request)
        if request.method in _CHANGING and needs_json(request):
            _check_content_type(request)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check_encoding(request)
            try:
                check_source(request)
            except Refused:
                if not _is_unix_socket(request):
                    raise
        except Refused as refused:
            body = {"error": {"code": refused.code, "message": refused.message}}
            return web.json_response(body, status=refused.status)
        return await handler(request)

    return guard


def host_of(url: str) -> str:
    """The host of a URL, for `Hosts`."""
    return urlsplit(url).hostname or url


def _check_encoding(request: web.Request) -> None:
    if not _is_utf8(request.path + request.query_string):
        raise Refused(400, "invalid", f"the path {request.path[:100]!a} is not valid UTF-8")
    for name, value in request.headers.items():
        if value.isascii() or _is_utf8(value):
            continue
        if name.lower() in _CREDENTIALS:
            raise Refused(401, "unauthorized", f"{name} is not valid UTF-8")
        raise Refused(400, "invalid", f"the header {name!a} is not valid UTF-8")


def _is_utf8(text: str) -> bool:
    """Whether a text from the request line or a header was UTF-8; other bytes are surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_host(request: web.Request, hosts: Hosts) -> None:
    given = request.headers.getall(hdrs.HOST, [])
    if len(given) != 1 or not hosts.includes(given[0]):
        shown = ", ".join(repr(host[:100]) for host in given) or "missing"
        raise Refused(
            403,
            "foreign_host",
            f"Host {shown} does not name this server; call it by the address that it is bound to, "
            "or add the name to allowed_hosts",
        )


def _check_browser(request: web.Request) -> None:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is not None and not _same_origin(origin, request.headers.get(hdrs.HOST, "")):
        raise Refused(
            403, "foreign_origin", f"Origin {origin[:100]!r}: pages of other sites are refused"
        )
    site = request.headers.get("Sec-Fetch-Site", "none").strip().lower()
    if site not in _OWN_SITE:
        raise Refused(
            403, "foreign_origin", f"Sec-Fetch-Site {site[:100]!r}: other sites are refused"
        )


def _is_navigation(request: web.Request) -> bool:
    """Whether a browser opens the path in a tab: by a link or by typing it, not within a frame."""
    mode, target = (request.headers.get(f"Sec-Fetch-{name}") for name in ("Mode", "Dest"))
    return request.method == "GET" and mode == "navigate" and target == "document"


def _check_content_type(request: web.Request) -> None:
    """A body must be JSON. Without a body, clients may send another type, but not one that a page
    can send to other sites without a preflight request."""
    if request.content_type == "application/json":
        return
    if request.body_exists or request.content_type in _WITHOUT_PREFLIGHT:
        given = request.headers.get(hdrs.CONTENT_TYPE, "missing")
        raise Refused(
            415, "content_type", f"Content-Type {given[:100]!r}: send the body as application/json"
        )


def _same_origin(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
        default = {"http": ":80", "https": ":443"}[parts.scheme]
    except (ValueError, KeyError):
        return False
    return parts.netloc.lower().removesuffix(default) == host.lower().removesuffix(default)


def _name(host: str) -> str:
    """The host in lower case without port, brackets and trailing dot."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)


def _is_unix_socket(request: web.Request) -> bool:
    transport = request.transport
    return transport is not None and isinstance(transport.get_extra_info("sockname"), str | bytes)
