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
            ValueError: the URL's host or port is invalid.
        """
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
