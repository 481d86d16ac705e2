"""The files of the page, read once, with the headers that keep foreign content from running.

The page itself has no data and needs no key. Invariant: the browser runs only our own files and
connects only to this server.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import hdrs, web

from proxy.http.route import Who, route

_SOURCES = ("script-src", "style-src", "connect-src", "img-src")
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{source} 'self'" for source in _SOURCES),
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "require-trusted-types-for 'script'; trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page as it is sent."""

    zipped: bytes
    content_type: str
    etag: str


class PageFiles:
    """The handlers of the page and its files."""

    @route("GET", "/", summary="The page", who=Who.ANYONE, other_types=("text/html",))
    async def _page(self, request: web.Request) -> web.Response:
        return _answer(request, "index.html")

    @route(
        "GET",
        "/view/static/{name:[a-z0-9_./-]+}",
        summary="A file of the page",
        who=Who.ANYONE,
        refusals=(404,),
        other_types=("text/javascript", "text/css", "image/svg+xml"),
    )
    async def _static(self, request: web.Request) -> web.Response:
        return _answer(request, request.match_info["name"])


def _answer(request: web.Request, name: str) -> web.Response:
    file = page_files().get(name)
    if file is None:
        raise web.HTTPNotFound(text="the page has no such file", headers=HEADERS)
    caching = {hdrs.ETAG: file.etag, hdrs.CACHE_CONTROL: "no-cache"}
    if request.headers.get(hdrs.IF_NONE_MATCH) == file.etag:
        return web.Response(status=304, headers=HEADERS | caching)
    encoded = "gzip" in request.headers.get(hdrs.ACCEPT_ENCODING, "")
    return web.Response(
        body=file.zipped if encoded else gzip.decompress(file.zipped),
        content_type=file.content_type,
        charset="utf-8",
        headers=HEADERS | caching | ({hdrs.CONTENT_ENCODING: "gzip"} if encoded else {}),
    )


def file_text(name: str) -> str:
    """The text of a file by its path below `client/`."""
    return gzip.decompress(page_files()[name].zipped).decode()


@cache
def page_files() -> dict[str, PageFile]:
    """All files by their path below `client/`."""
    return dict(_files(resources.files(__package__).joinpath("client"), ""))


def _files(folder: Traversable, prefix: str) -> list[tuple[str, PageFile]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{prefix}{entry.name}/")
        elif (kind := "." + entry.name.rpartition(".")[2]) in _TYPES:
            data = entry.read_bytes()
            etag = f'"{sha256(data).hexdigest()[:16]}"'
            found.append(
                (prefix + entry.name, PageFile(gzip.compress(data, mtime=0), _TYPES[kind], etag))
            )
    return found
