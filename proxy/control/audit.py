"""The audit log: what the control plane was told to change, by which key, and with what result.

One JSON line per request that changes something or was refused for its key; requests that only read
are not logged. A request that failed, or whose client left before the answer, has a line, because
it may have changed something. Invariant: a line has a digest of the key and never the key, and
nothing that agents or models say. Like the lines of calls, these lines are only in JSON logs;
`log_level` does not limit them.
"""

from __future__ import annotations

import hashlib
import logging

from aiohttp import web

from proxy.control.siblings import is_from_sibling
from proxy.http.server import api_key
from proxy.machine.logs import AUDIT

TRIAL_ID = web.RequestKey("trial_id", str)
"""The id of the session that a request has created."""
DIGEST_CHARACTERS = 12
"""Enough to tell keys apart, and too few to search for a key that somebody chose."""

CLIENT_LEFT = 499
"""Logged as the status of a request that was cancelled: its client left, or the proxy stopped."""
FAILED = 500
"""Logged as the status of a request that ended with an unexpected error."""

_log = logging.getLogger(AUDIT)


def record(request: web.Request, operation: str, status: int) -> None:
    """Writes the line of a request, unless another process of this proxy writes it.

    Example: {"logger": "proxy.audit", "message": "control", "operation": "complete", "method":
    "POST", "path": "/sessions/t-1/complete", "trial_id": "t-1", "status": 200, "remote":
    "10.1.2.3", "key": "9f86d081884c", …}
    """
    if (request.method == "GET" and status != 401) or is_from_sibling(request):
        return
    fields = {
        "operation": operation,
        "method": request.method,
        "path": request.path,
        "trial_id": request.get(TRIAL_ID, request.match_info.get("trial_id")),
        "status": status,
        "remote": request.remote,
        "key": key_digest(api_key(request.headers)),
    }
    _log.info("control", extra={"fields": fields})


def key_digest(key: str | None) -> str | None:
    """What the log shows of a key: `printf %s KEY | sha256sum | cut -c-12`."""
    if not key:
        return None
    hashed = hashlib.sha256(key.encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()[:DIGEST_CHARACTERS]
