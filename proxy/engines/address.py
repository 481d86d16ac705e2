"""The URL of an engine and its API key.

An engine's URL may contain its key as `http://:KEY@HOST:PORT`, like the URL of a database.
Invariant: the key is removed from the URL here, so that no log line, error or listing shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, unquote, urlsplit


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Example: EngineAddress.parse("http://:secret@127.0.0.1:9000/v1")"""

    url: str
    """The URL without the key, without `/v1` and without a trailing slash."""
    key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, *, key: str | None = None) -> Self:
        """`key`, if given, has precedence over the URL's key.

        Raises:
            ValueError: it is not an HTTP URL, or its host or port is invalid. The message does not
                contain the key.
        """
        if not _is_valid(url):
            _, key, bare = url.rpartition("@")
            shown = f"the URL that ends with {'@' + bare!r}" if key else repr(url)
            raise ValueError(
                f"{shown} is not an http:// or https:// URL like http://:KEY@HOST:PORT; "
                "in the key, write %2F for /, %3F for ?, %23 for # and %40 for @"
            )
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        bare = parts._replace(netloc=host).geturl().rstrip("/").removesuffix("/v1")
        return cls(bare, key or unquote(parts.password or parts.username or "") or None)

    @property
    def with_key(self) -> str:
        """The URL with the key in it."""
        if self.key is None:
            return self.url
        scheme, separator, rest = self.url.partition("://")
        return f"{scheme}{separator}:{quote(self.key, safe='')}@{rest}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that authenticate a request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


def _is_valid(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    # A key with a `/` in it ends the host there, and leaves its `@` behind.
    cut = "@" in parts.path or "@" in parts.query or "@" in parts.fragment
    return parts.scheme in ("http", "https") and named and not cut
