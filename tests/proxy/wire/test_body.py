"""Bodies are refused by their size and depth before they are processed."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import RequestError
from proxy.records import TurnStatus
from proxy.wire.body import MAX_CONTAINERS, MAX_KEYS, MAX_NESTING, MAX_VALUES, Body, parse_body
from tests.proxy.conftest import RunningProxy

USER = {"role": "user", "content": "Hi."}


def nested(levels: int, kind: str = "{}") -> bytes:
    """JSON with this number of levels."""
    opened = b'{"a":' if kind == "{}" else b"["
    return opened * levels + b"1" + kind[1].encode() * levels


def chat(field: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "Hi."}], ' + field + b"}"


FIELDS: list[tuple[str, bytes, str]] = [
    (
        "chat/completions",
        chat(
            b'"response_format": {"type": "json_schema", '
            b'"json_schema": {"name": "a", "schema": %s}}'
        ),
        "response_format.json_schema.schema",
    ),
    (
        "chat/completions",
        chat(b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'),
        "tools[0].function.parameters",
    ),
    ("chat/completions", chat(b'"metadata": %s'), "metadata"),
    (
        "messages",
        b'{"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": '
        b'[{"type": "tool_use", "id": "c", "name": "f", "input": %s}]}], "max_tokens": 5}',
        "messages[1].content[0]",
    ),
    (
        "messages/count_tokens",
        b'{"messages": [{"role": "user", "content": "Hi."}], "tools": [{"name": "f", '
        b'"input_schema": %s}]}',
        "tools[0].input_schema",
    ),
    (
        "responses",
        b'{"input": [{"type": "function_call_output", "call_id": "c", "output": %s}]}',
        "input[0].output",
    ),
    ("responses", b'{"input": "Hi.", "text": {"format": %s}}', "text.format"),
    ("completions", b'{"prompt": "Hi.", "response_format": %s}', "response_format"),
]


@pytest.mark.parametrize("levels", [MAX_NESTING, 254, 300, 1022, 1025, 50_000])
@pytest.mark.parametrize(("route", "body", "place"), FIELDS)
async def test_field_nested_too_deep_is_refused_by_name_without_a_turn(
    proxy: RunningProxy, route: str, body: bytes, place: str, levels: int
) -> None:
    session = await proxy.session()
    status, reply = await proxy.post(session, route, body % nested(levels))
    assert status == 400, reply
    assert reply["error"]["message"].startswith(place)
    assert str(MAX_NESTING) in reply["error"]["message"]
    status, _ = await proxy.post(session, "chat/completions", {"messages": [USER]})
    assert status == 200
    _, turns = await proxy.record(session)
    assert [(turn.index, turn.status) for turn in turns] == [(0, TurnStatus.DONE)]


@pytest.mark.parametrize(("route", "body", "place"), FIELDS)
async def test_any_depth_within_the_limit_is_answered_and_recorded(
    proxy: RunningProxy, route: str, body: bytes, place: str
) -> None:
    session = await proxy.session()
    for kind in ("{}", "[]"):
        status, reply = await proxy.post(session, route, body % nested(MAX_NESTING - 8, kind))
        assert status in (200, 400), reply
    _, turns = await proxy.record(session)
    assert [turn.index for turn in turns] == list(range(len(turns)))


@given(st.integers(0, 200), st.sampled_from(["{}", "[]"]), st.sampled_from(["a", '"', "\\", "[["]))
def test_body_is_accepted_up_to_exactly_the_limit(levels: int, kind: str, text: str) -> None:
    inner = orjson.loads(nested(levels, kind))
    body = orjson.dumps({"text": text, "field": inner})
    if levels < MAX_NESTING:
        assert parse_body(Body(body)).data == {"text": text, "field": inner}
    else:
        with pytest.raises(RequestError, match=f"^field.*at most {MAX_NESTING} levels"):
            parse_body(Body(body))


BRACKETS = b"[" + b",".join([b"[]"] * (MAX_CONTAINERS + 1)) + b"]"
NUMBERS = b"[" + b",".join([b"1"] * (MAX_VALUES + 2)) + b"]"
KEYS = b"{" + b",".join(b'"%d":1' % number for number in range(MAX_KEYS)) + b"}"


@pytest.mark.parametrize(
    ("values", "bound"),
    [(BRACKETS, MAX_CONTAINERS), (NUMBERS, MAX_VALUES), (KEYS, MAX_KEYS)],
    ids=["containers", "values", "fields"],
)
def test_body_with_too_many_values_is_refused_before_decoding(values: bytes, bound: int) -> None:
    with pytest.raises(RequestError, match=f"at most {bound} are allowed") as refused:
        parse_body(Body(b'{"messages": ' + values + b"}"))
    assert refused.value.status == 413


def test_brackets_and_commas_inside_strings_do_not_count() -> None:
    text = '[{,"\\' * (MAX_VALUES // 2)
    assert parse_body(Body(orjson.dumps({"text": text}))).data == {"text": text}


def test_unclosed_strings_are_refused_in_linear_time() -> None:
    began = time.process_time()
    for text in (b'{"a": "' + b'\\"[' * 2_000_000, b'"' * 3_000_001 + b"[" * MAX_CONTAINERS * 2):
        with pytest.raises(RequestError):
            parse_body(Body(text))
    assert time.process_time() - began < 20


def test_body_that_is_not_an_object_is_refused() -> None:
    bodies: list[tuple[bytes, Any]] = [(b"[]", "not an object"), (b"{", "not JSON")]
    for body, says in bodies:
        with pytest.raises(RequestError, match=says):
            parse_body(Body(body))
