"""The process's log on standard error: lines of text, or one JSON object per line.

JSON logs also have one line per call (trial, call, dialect, status, duration), and the audit log of
the control plane (`proxy/control/audit.py`) at every level. Invariant: no line holds a key, a
token, or text of agents and models; `tests/proxy/machine/test_logs.py` checks this.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

import orjson

from proxy.http.valid_json import valid_json, valid_text

LogKind = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
CALLS = "proxy.calls"
"""Name of the logger of calls."""
AUDIT = "proxy.audit"
"""Name of the logger of the control plane's audit log."""
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def set_up(kind: LogKind, level: LogLevel) -> None:
    """Sets up logging for the whole process. A program calls it once."""
    least = logging.getLevelNamesMapping()[level.upper()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=least, handlers=[handler])
    # A line per request is for machines; in a text log it would hide the other lines.
    of_requests = logging.INFO if kind == "json" else logging.WARNING
    logging.getLogger(CALLS).setLevel(max(least, of_requests))
    logging.getLogger(AUDIT).setLevel(of_requests)  # at every level


class JsonLines(logging.Formatter):
    """Example: {"at": 1.78e9, "level": "INFO", "logger": "proxy.calls", "message": "call",
    "trial_id": "t-1", "call_id": "t-1#4", "dialect": "chat", "status": 200, …}"""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=_valid).decode()
        except orjson.JSONEncodeError:  # such as a lone surrogate in an error's message
            return orjson.dumps(valid_json(line), default=_valid).decode()


def _valid(value: object) -> str:
    return valid_text(str(value))


class CallLog:
    """Writes one line per call, if calls are logged."""

    def __init__(self) -> None:
        self._log = logging.getLogger(CALLS)

    @property
    def wanted(self) -> bool:
        return self._log.isEnabledFor(logging.INFO)

    def write(self, **fields: Any) -> None:
        """Writes a line with `fields`."""
        self._log.info("call", extra={"fields": fields})
