"""The rules of Chrome's JSON trace format, as Perfetto's importer applies them."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def events_of(trace: bytes) -> list[Event]:
    """The events of a trace that follows the rules."""
    document = json.loads(trace, parse_constant=_refuse)
    assert document.keys() == {"traceEvents"}
    events: list[Event] = document["traceEvents"]
    for event in events:
        _check_fields(event)
    _check_names(events)
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for spans in lanes.values():
        _check_nesting(spans)
    return events


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _check_fields(event: Event) -> None:
    assert event["ph"] in ("M", "X", "C"), event
    assert isinstance(event["name"], str)
    assert event["name"]
    for name in ("pid", "tid"):
        assert type(event[name]) is int
        assert event[name] > 0
    if event["ph"] != "M":
        assert type(event["ts"]) is int
        assert event["ts"] > 0
    if event["ph"] == "X":
        assert type(event["dur"]) is int
        assert event["dur"] >= 0
    if event["ph"] == "C":
        assert all(type(value) is int and value >= 0 for value in event["args"].values())
    if event["ph"] == "M":
        key = "sort_index" if event["name"] == "process_sort_index" else "name"
        assert event["args"].keys() == {key}


def _check_names(events: list[Event]) -> None:
    """Every process and every lane with spans has one name."""
    named = [
        (event["name"], event["pid"], event["tid"] if event["name"] == "thread_name" else 1)
        for event in events
        if event["ph"] == "M"
    ]
    assert len(named) == len(set(named))
    for event in events:
        if event["ph"] != "M":
            assert ("process_name", event["pid"], 1) in named
            assert ("thread_name", event["pid"], event["tid"]) in named


def _check_nesting(spans: list[Event]) -> None:
    """By time, and in the order of the file where times are equal: each span is in the open one, or
    begins after its end."""
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda each: int(each["ts"])):
        start, end = span["ts"], span["ts"] + span["dur"]
        while open_ends and open_ends[-1] <= start and (end > open_ends[-1] or end > start):
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], span
        open_ends.append(end)
