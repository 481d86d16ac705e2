"""Who may read the page: a link that works once, keys that can be revoked, the admin key, and keys
of people, who see their own sessions.

Each of these secrets is exchanged for a cookie of one browser. Invariant: the store has digests
only; a key that is revoked, and an admin key or a person's that is removed, ends its cookies at
once, in every process; no secret is part of a URL's path or query, so that no log and no `Referer`
has it (links carry it after `#`, which browsers keep).

A cookie from such a key is stored as a digest of both. The digest of the key alone could be
searched for a key that somebody chose.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiohttp import web

from proxy.admin_key import AdminKeys
from proxy.errors import ConfigurationError
from proxy.http.server import api_key
from proxy.person_keys import PersonKeys, Scope
from proxy.store.browser import Browser, Grant, GrantKind

LINK_S = 600.0
"""Seconds for which a link that nobody has opened stays valid: until its reader has seen it."""
LINK_SUFFIX = ".link"
"""Of the file beside the proxy's key file that holds the link where it is not printed."""
COOKIE_S = 7 * 24 * 3600.0
LINK_NAME, EDIT_NAME, ADMIN_NAME = "link", "view --edit", "admin"
"""Names of the cookies that come from a link, from one that may edit (no key can have this name),
and from the admin key."""
COOKIE_PATH = "/view"
_NAME = re.compile(r"[\w.@+-]{1,80}")
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads the page. Example: Reader(Scope("ann"), edits=True)"""

    scope: Scope
    edits: bool
    """Whether the reader may change the sessions of the scope: the administrator, a person, or
    somebody who asked for it with `view --edit`. Another link only reads: it is printed, and what
    is printed is often kept."""


class Access:
    """Exchanges secrets for cookies and checks these."""

    def __init__(
        self,
        browser: Callable[[], Browser],
        admin_keys: AdminKeys,
        people: PersonKeys | None = None,
        *,
        secure: bool,
    ) -> None:
        """`secure`: browsers reach the page by https only."""
        self._browser = browser
        self._admin_keys = admin_keys
        self._people = PersonKeys({}) if people is None else people
        self._secure = secure

    async def log_in(self, secret: str) -> str | None:
        """A new cookie's value; None if the secret opens nothing."""
        if self._admin_keys.accepts(secret):
            key = secret.encode()
            return await _grant(self._browser(), GrantKind.COOKIE, ADMIN_NAME, COOKIE_S, key)
        if person := self._people.person_of(secret):
            own = Scope(person).prefix
            return await _grant(self._browser(), GrantKind.COOKIE, own, COOKIE_S, secret.encode())
        name = await self._name_of(secret)
        if name is None:
            return None
        return await _grant(self._browser(), GrantKind.COOKIE, name, COOKIE_S)

    async def log_out(self, request: web.Request) -> None:
        cookie = request.cookies.get(_cookie_name(request), "")
        for _, key in self._origins():
            await self._browser().take_grant(_digest(cookie, key))

    async def reader(self, request: web.Request) -> Reader | None:
        """Who has the request's valid cookie, or the key in its headers (for programs); None: it
        may not read."""
        cookie = request.cookies.get(_cookie_name(request))
        name = None if cookie is None else await self._cookie_of(cookie)
        if name is None and (key := api_key(request.headers)) is not None:
            name = await self._key_of(key)
        if name is None:
            return None
        person = name.removesuffix("/") if name.endswith("/") else ""
        return Reader(Scope(person), edits=bool(person) or name in (ADMIN_NAME, EDIT_NAME))

    async def _key_of(self, key: str) -> str | None:
        """The name of the grant that the key stands for."""
        if self._admin_keys.accepts(key):
            return ADMIN_NAME
        if person := self._people.person_of(key):
            return Scope(person).prefix
        found = await self._found(key, GrantKind.KEY)
        return None if found is None else found.name

    def set_cookie(self, request: web.Request, response: web.Response, value: str) -> None:
        options: dict[str, Any] = {"path": COOKIE_PATH, "httponly": True, "samesite": "Strict"}
        response.set_cookie(
            _cookie_name(request), value, max_age=int(COOKIE_S), secure=self._secure, **options
        )

    async def _name_of(self, secret: str) -> str | None:
        """Whom the secret was given to. A link is used up."""
        digest = _digest(secret)
        found = await self._browser().find_grant(digest)
        if found is not None and found.kind is GrantKind.LINK:
            found = await self._browser().take_grant(digest)
        if found is None or found.kind is GrantKind.COOKIE or _is_over(found):
            return None
        return found.name

    async def _cookie_of(self, cookie: str) -> str | None:
        """The name of the grant from which a valid cookie comes; None: it is not valid."""
        for name, key in self._origins():
            found = await self._found(cookie, GrantKind.COOKIE, key)
            if found is not None and found.name == (name or _of_nobody(found.name)):
                return found.name
        return None

    def _origins(self) -> list[tuple[str, bytes]]:
        """`(name of the grant, key)` of the keys from which a cookie may come; both are empty for a
        cookie from a link or a key of `view-key`."""
        admin = [(ADMIN_NAME, key) for key in self._admin_keys.current()]
        people = [(Scope(person).prefix, key) for person, key in self._people.current()]
        return [("", b""), *admin, *people]

    async def _found(self, secret: str, kind: GrantKind, admin_key: bytes = b"") -> Grant | None:
        found = await self._browser().find_grant(_digest(secret, admin_key))
        return None if found is None or found.kind is not kind or _is_over(found) else found


async def new_link(browser: Browser, *, edits: bool = False) -> str:
    """The secret of a link that opens the page once; with `edits`, to change sessions as well."""
    return await _grant(browser, GrantKind.LINK, EDIT_NAME if edits else LINK_NAME, LINK_S)


def said_link(url: str, secret: str, file: Path) -> str:
    """What a command says about a link: the link itself on a terminal; elsewhere, where the output
    may be a log that others read, the file of its user's that holds it.

    Raises:
        OSError: the file cannot be written.
    """
    link, minutes = f"{url}/#link={secret}", int(LINK_S / 60)
    if sys.stdout.isatty():
        return f"{link} (opens once, within {minutes} minutes)"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with open(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as written:
        written.write(f"{link}\n")
    return f"{url} (the link in {file} opens it once, within {minutes} minutes)"


async def new_key(browser: Browser, name: str) -> str:
    """A key that opens the page until `browser.revoke_grants(name)`.

    Raises:
        ConfigurationError: the name cannot be used, or has a key.
    """
    if not _NAME.fullmatch(name) or name in (LINK_NAME, ADMIN_NAME):
        raise ConfigurationError(
            f"the key's name {name[:80]!r} cannot be used: use 1 to 80 letters, digits and . @ + -"
            f" _, and neither {LINK_NAME!r} nor {ADMIN_NAME!r}"
        )
    if name in {key.name for key in await browser.grants(GrantKind.KEY)}:
        raise ConfigurationError(f"a key {name!r} exists; revoke it, or choose another name")
    return await _grant(browser, GrantKind.KEY, name, None)


async def _grant(
    browser: Browser, kind: GrantKind, name: str, lasts_s: float | None, admin_key: bytes = b""
) -> str:
    secret, now = secrets.token_urlsafe(_SECRET_BYTES), time.time()
    expires_at = None if lasts_s is None else now + lasts_s
    await browser.add_grant(Grant(_digest(secret, admin_key), kind, name, now, expires_at))
    return secret


def _cookie_name(request: web.Request) -> str:
    """Cookies do not distinguish ports, so that two proxies of one host need different names."""
    port = request.host.rpartition(":")[2]
    return f"agentic_view_{port}" if port.isdecimal() else "agentic_view"


def _digest(secret: str, admin_key: bytes = b"") -> bytes:
    """`admin_key` is the one that a cookie comes from."""
    given = secret.encode(errors="surrogatepass")
    return hmac.digest(admin_key, given, "sha256") if admin_key else sha256(given).digest()


def _of_nobody(name: str) -> str:
    """The name, if no cookie from an admin key or a person's has it; else empty."""
    return "" if name == ADMIN_NAME or name.endswith("/") else name


def _is_over(grant: Grant) -> bool:
    return grant.expires_at is not None and grant.expires_at < time.time()
