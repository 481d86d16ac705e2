"""Any value becomes JSON that any reader can take."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.http.valid_json import MAX_LEVELS, read_json, valid_json, write_json

DEEP = MAX_LEVELS + 200
"""More levels than are kept, fewer than Python reads."""


def levels(value: Any) -> int:
    count = 0
    while isinstance(value, list):
        value, count = value[0] if value else None, count + 1
    return count


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (rb'{"a\ud800": ["\uDC00x", "\ud83d\ude00"]}', {"a?": ["?x", "\U0001f600"]}),
        (b'["\xed\xa0\x80"]', ["\ufffd\ufffd\ufffd"]),
        (b'["\xff"]', ["\ufffd"]),
        (b"[%d, -1]" % 10**30, [1e30, -1]),
        (b"[NaN, %d]" % -(10**30), [None, -1e30]),
        (b"[%d]" % 10**400, [None]),
        (b"1" * 5000, None),
        (b"[" * 100_000 + b"]" * 100_000, None),
        (b"{", None),
    ],
)
def test_what_is_read_can_be_written(raw: bytes, value: Any) -> None:
    assert orjson.loads(orjson.dumps(read_json(raw))) == value


def test_levels_are_bounded() -> None:
    for most in (MAX_LEVELS, DEEP):
        assert levels(read_json(b"[" * most + b"]" * most)) == MAX_LEVELS
    deep: list[Any] = []
    for _ in range(DEEP):
        deep = [deep]
    assert levels(orjson.loads(write_json(deep))) == MAX_LEVELS
    cycle: list[Any] = []
    cycle.append(cycle)
    assert levels(valid_json(cycle)) == MAX_LEVELS


def test_what_is_written_is_made_valid() -> None:
    value = {"a\ud800": "x\udfff", "big": 10**30, 3: ("y",), "no": None, "yes": True}
    expected = {"a?": "x?", "big": 1e30, "3": ["y"], "no": None, "yes": True}
    assert json.loads(write_json(value)) == expected
