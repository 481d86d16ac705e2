"""What a learner of daily sessions has decided, from the journal in its folder.

Invariant: only reads, also where no learner runs; a request reads a bounded piece of the journal. A
line that is not one of a journal is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.extras.view.answers import DecisionJson, DecisionsPage
from proxy.run_files.json_lines import Line, lines_before

JOURNAL = "journal.jsonl"
KINDS = ("update", "gate", "canary", "promote", "rollback", "order", "freeze", "thaw", "forgot")
"""The lines of a journal that are decisions."""
ORDERS = {"promote": "to promote it", "rollback": "to roll it back"}
COUNTED = ("replayed", "set_aside")
"""The lists of sessions of which the page has the lengths."""
MAX_WORDS = 10
"""Reasons of one decision."""
MAX_CHARS = 500
MAX_SESSIONS = 100


def decisions(journal: Path, before: int | None, limit: int) -> DecisionsPage:
    """At most `limit` decisions before a byte of the journal (None: its end), the newest first."""
    found, following = lines_before(journal, before, _is_decision, limit)
    return {"decisions": [_decision(line) for _, line in found], "next": following}


def _is_decision(line: Line) -> bool:
    return line.get("kind") in KINDS and all(
        isinstance(at, int | float) for at in (line.get("at"), line.get("said_at", 0))
    )


def _decision(line: Line) -> DecisionJson:
    kind, why = line["kind"], line.get("why") or line.get("failed") or []
    if kind == "order":
        why = ORDERS.get(str(line.get("order")), [])
    sessions = _texts(line.get("compared") or line.get("sessions"))
    return {
        "at": float(line["said_at"] if "said_at" in line else line["at"]),
        "kind": _kind(line),
        "adapter": _integer(line.get("number")),
        "beside": _integer(line.get("parent", line.get("stable"))),
        "by": str(line.get("by") or "")[:MAX_CHARS],
        "person": str(line.get("person") or "")[:MAX_CHARS],
        "why": _texts([why] if isinstance(why, str) else why)[:MAX_WORDS],
        "figures": {
            **_figures(line, ("share", "better", "worse", "alpha", "count"), "measures"),
            **{name: float(len(_texts(line.get(name)))) for name in COUNTED if line.get(name)},
        },
        "went_well": {
            name: [each for each in counts if isinstance(each, int)][:2]
            for name, counts in _fields(line.get("well")).items()
            if isinstance(counts, list)
        },
        "sessions": [] if kind == "forgot" else sessions[:MAX_SESSIONS],
        "more_sessions": 0 if kind == "forgot" else max(0, len(sessions) - MAX_SESSIONS),
    }


def _kind(line: Line) -> str:
    if line["kind"] == "gate" and not line.get("passed"):
        return "refused"
    return "failed" if line["kind"] == "update" and line.get("failed") else str(line["kind"])


def _figures(line: Line, names: tuple[str, ...], within: str) -> dict[str, float]:
    given = {**{name: line.get(name) for name in names}, **_fields(line.get(within))}
    return {
        name: float(value)
        for name, value in given.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    return [str(each)[:MAX_CHARS] for each in value] if isinstance(value, list) else []


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
