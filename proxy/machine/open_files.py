"""The number of files and connections that this process may have open.

Invariant: a server refuses calls with 429 before the system refuses it connections: without a free
descriptor it could not even answer `/health`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import resource

RESERVED = 256
"""Descriptors for all but agents' calls: the store, logs, engines' health checks, the page."""
PER_CALL = 2
"""An agent's connection, and one to an engine."""

_log = logging.getLogger(__name__)


@functools.cache
def limit_at_start() -> int:
    """The soft limit with which this process was started, which it gives to programs of others: a
    program that uses `select`, or closes every number up to the limit, relies on a low one."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """Raises the soft limit of this process to the hard one, and returns it. Many systems set a
    soft limit of 1,024, for programs that use `select`."""
    limit_at_start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # macOS refuses an unlimited number
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft


def calls_that_fit(wanted: int) -> int:
    """The number of calls in flight that the limit allows, at most `wanted`; a lower one is
    logged."""
    limit = raise_limit()
    if limit == resource.RLIM_INFINITY:
        return wanted
    fitting = max(1, (limit - RESERVED) // PER_CALL)
    if fitting >= wanted:
        return wanted
    _log.warning(
        "this process may open %d files, so that it accepts %d calls in flight and not "
        "limits.in_flight_calls=%d; for more, raise the limit (ulimit -n %d)",
        *(limit, fitting, wanted, PER_CALL * wanted + RESERVED),
    )
    return fitting
