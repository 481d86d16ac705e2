"""The form of the page's answers, which no browser keeps or runs."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from proxy.extras.view import pages
from proxy.http.valid_json import write_json

HEADERS = {**pages.HEADERS, "Cache-Control": "no-store"}
ALONE = {"Content-Security-Policy": "default-src 'none'; sandbox"}
"""Of a foreign image or report that a browser opens as a page of its own."""


def answer(data: Mapping[str, object], status: int = 200) -> web.Response:
    """`data`: one of the types of `answers`, or `{}`."""
    return web.Response(
        body=write_json(data), status=status, content_type="application/json", headers=HEADERS
    )
