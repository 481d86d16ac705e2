"""Asks the other proxies on one store, each with an address of its own, the same question."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from proxy.http.server import sent_body
from proxy.store.protocol import Store

CONNECT_TIMEOUT_S = 2.0
ANSWER_S = 10.0
"""Seconds for an answer, besides those for which the question lets a proxy wait."""

_JSON = {"Content-Type": "application/json"}
_KEYS = ("Authorization", "x-api-key")
_log = logging.getLogger(__name__)


async def ask_others(
    store: Store, request: web.Request, query: dict[str, str], wait_s: float, body: bytes = b""
) -> list[Any]:
    """The answers, as JSON, of those that answer 200 to the same request with this query. The rest
    have no relay, another admin key, or have ended, which the log says. The query must say that
    they are not to ask in turn."""
    if not (addresses := await store.others()):
        return []
    headers = {name: request.headers[name] for name in _KEYS if name in request.headers}
    timeout = aiohttp.ClientTimeout(wait_s + ANSWER_S, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:

        async def ask(address: str) -> Any:
            try:
                url = f"{address}{request.path}"
                async with http.request(
                    request.method,
                    url,
                    params=query,
                    data=sent_body(body),
                    headers=_JSON,
                    allow_redirects=False,  # the admin key is for this proxy only
                ) as response:
                    if response.status == HTTPStatus.OK:
                        return orjson.loads(await response.read())
                    said = f"answered {response.status}"
            except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
                said = f"did not answer ({type(error).__name__}: {error})"
            _log.warning("%s: the proxy at %s %s", request.path, address, said)
            return None

        answers = await asyncio.gather(*map(ask, addresses))
    return [answer for answer in answers if answer is not None]
