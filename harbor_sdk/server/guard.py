"""Authorization: holders of the token may call `harbor-server`, and web pages in a browser may not.

Invariant: every route except `/health` needs the token. No route answers a request from a web page
of another origin, or a request to a loopback server whose `Host` names another machine (DNS
rebinding). No handler gets a path or a header that is not UTF-8.
"""

from __future__ import annotations

import ctypes
import hmac
import ipaddress
import logging
import os
import re
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from aiohttp.web_protocol import PayloadAccessError, RequestPayloadError

from harbor_sdk.errors import AgentRunError

TOKEN_FILE = "token"
"""In the server's state folder, mode 0600: the token that the server created."""

PR_SET_DUMPABLE = 4

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HOST = re.compile(r"\[?([^\[\]]*?)\]?(:\d+)?")
"""A Host header: name or address, IPv6 in brackets, and a port."""


WIRE_ERRORS = (HttpProcessingError, RequestPayloadError, PayloadAccessError, ConnectionError)
"""Faults of a client on the wire: wrong framing or encoding, a connection that it closed."""


def request_log() -> logging.Logger:
    """aiohttp's log of failed requests, without those that only the client got wrong."""
    log = logging.getLogger("aiohttp.server.harbor")
    log.addFilter(_is_our_error)
    return log


def _is_our_error(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], WIRE_ERRORS))


def hide_memory() -> None:
    """Keeps other processes of this user (not root's) from this process's memory, descriptors and
    environment in `/proc`. Does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def kept_token(state_dir: Path) -> str:
    """The token in the state folder. It is created if it does not exist."""
    path = state_dir / TOKEN_FILE
    if not path.exists():
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f"{TOKEN_FILE}.{os.getpid()}")
        new.touch(mode=0o600)
        new.write_text(secrets.token_urlsafe(32), encoding="utf-8")
        new.replace(path)
    return path.read_text(encoding="utf-8").strip()


def guard(host: str, token: str) -> Middleware:
    """Middleware for a server that listens on `host`. Raises `AgentRunError` 401 or 403."""
    loopback = is_loopback(host)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_encoding(request)
        named = _HOST.fullmatch(request.host)
        if loopback and not (named and is_loopback(named[1])):
            raise _forbidden(f"Host {request.host!r} is not this machine: use 127.0.0.1")
        _refuse_foreign_pages(request)
        if request.path != "/health" and not _has_token(request, token):
            raise AgentRunError(
                "missing or wrong token: send Authorization: Bearer <token> "
                "(clients read HARBOR_SERVER_TOKEN)",
                code="unauthorized",
                status=401,
            )
        return await handler(request)

    return guarded


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def answer_expect(request: web.Request) -> None:
    """Handles `Expect`. aiohttp's own handler quotes the header, which fails if it is not UTF-8."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: only 100-continue is supported")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0


def _check_encoding(request: web.Request) -> None:
    """Bytes that are not UTF-8 arrive as surrogates, which no file, database or answer accepts.
    A token with such bytes is a wrong token."""
    others = [value for name, value in request.headers.items() if name != "Authorization"]
    for text in (request.path, request.query_string, *others):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise AgentRunError(f"{text[:100]!a} is not valid UTF-8", code="invalid") from None


def _refuse_foreign_pages(request: web.Request) -> None:
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in ("none", "same-origin"):
        raise _forbidden(f"Sec-Fetch-Site is {site!r}: this server answers no web pages")
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise _forbidden(f"Origin {origin!r} is another site: this server answers no web pages")


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Header bytes that are not UTF-8 arrive as surrogates.
    return scheme == "Bearer" and hmac.compare_digest(
        given.encode(errors="surrogateescape"), token.encode()
    )


def _forbidden(message: str) -> AgentRunError:
    return AgentRunError(message, code="forbidden", status=403)
