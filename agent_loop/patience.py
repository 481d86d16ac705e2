"""Control calls to a proxy that is being restarted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_exponential

from proxy.client import ProxyClientError

Result = TypeVar("Result")
AWAY = frozenset({0, 502, 503, 504})
"""Status of a control call that found no proxy: 502 and 504 are a load balancer's."""


async def patiently(call: Callable[[], Awaitable[Result]], patience_s: float) -> Result:
    """Repeats a control call while the proxy cannot be reached, for at most `patience_s`.

    Raises:
        ProxyClientError: the proxy refused the call, or could not be reached in this time.
    """
    async for attempt in AsyncRetrying(
        retry=retry_if_exception(_is_away),
        stop=stop_after_delay(patience_s),
        wait=wait_exponential(multiplier=0.05, max=2.0),
        reraise=True,
    ):
        with attempt:
            result = await call()
    return result


def _is_away(error: BaseException) -> bool:
    return isinstance(error, ProxyClientError) and error.status in AWAY
