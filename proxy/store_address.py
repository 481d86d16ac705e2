"""The password in a store's URL: given as a file, and not shown.

Example: postgresql://agentic@db:5432/agentic with the file's content `p@ss/word` becomes
postgresql://agentic:p%40ss%2Fword@db:5432/agentic.
"""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from proxy.shown_config import without_credentials


def with_password(url: str, password: str) -> str:
    """The URL with the password, any character of which may be special in a URL."""
    parts = urlsplit(url)
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()


def without_password(url: str) -> str:
    """The URL for people and logs, with the user and without a password, also in its query."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}{at}{without_credentials(host)}"
