"""Any input gets a response in the dialect's form, never a 500, and never hangs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.records import SessionKind, TurnStatus
from tests.proxy.conftest import RunningProxy

ROUTES = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
NAMES = (
    "model",
    "messages",
    "input",
    "prompt",
    "system",
    "role",
    "content",
    "type",
    "text",
    "name",
    "arguments",
    "tool_calls",
    "tools",
    "function",
    "parameters",
    "input_schema",
    "tool_call_id",
    "tool_use_id",
    "call_id",
    "id",
    "call",
    "output",
    "reasoning",
    "stream",
    "n",
    "max_tokens",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "stop_sequences",
    "seed",
    "logprobs",
    "top_logprobs",
    "response_format",
    "tool_choice",
    "thinking",
    "instructions",
    "summary",
    "previous_response_id",
    "json_schema",
    "schema",
    "stream_options",
    "include_usage",
    "include",
    "format",
)
WORDS = (
    "user",
    "assistant",
    "system",
    "tool",
    "developer",
    "text",
    "tool_use",
    "tool_result",
    "function",
    "function_call",
    "function_call_output",
    "message",
    "reasoning",
    "input_text",
    "image_url",
    "auto",
    "none",
    "required",
    "any",
    "json_object",
    "json_schema",
    "resp_0_x",
    "custom",
    "namespace",
    "<think>",
    "<|im_end|>",
    "<tool_call>",
)
DEEP = b'{"a":' * 500 + b"1" + b"}" * 500
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([*WORDS, "", "\x00", "\ud7ff", "\U0001f600"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
)
names = st.sampled_from(NAMES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=25,
)
roles = st.sampled_from(WORDS[:5]) | scalars
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles, "content": st.text("ab", max_size=3) | st.lists(values, max_size=2)},
        optional={"tool_calls": values, "tool_call_id": scalars, "reasoning": scalars},
    ),
    max_size=4,
)
VALID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi."}],
    "input": "Hi.",
    "prompt": "Hi.",
    "max_tokens": 5,
}
RESPONSES_PROMPT = ("responses", "prompt")
bodies = (
    st.dictionaries(names, values, max_size=3).map(lambda change: VALID | change)
    | messages.map(lambda some: VALID | {"messages": some, "input": some})
    | st.dictionaries(names, values, max_size=8)
)


@pytest.mark.parametrize("route", ROUTES)
async def test_no_json_body_causes_a_server_error(proxy: RunningProxy, route: str) -> None:
    session = await proxy.session(SessionKind.EVAL)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/{route}"
    seen: list[bytes] = []

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies)
    def collect(body: dict[str, Any]) -> None:
        if (route, "prompt") == RESPONSES_PROMPT:
            body.pop("prompt", None)
        seen.append(json.dumps(body).encode())  # with integers beyond 64 bits, which are valid JSON

    collect()
    answered = 0
    for data in seen:
        async with (
            asyncio.timeout(20),
            proxy.http.post(url, data=data, headers=headers) as response,
        ):
            status, reply = response.status, await response.read()
        assert status in (200, 400, 403, 404, 413, 429), (status, data, reply)
        if status != 200:
            assert orjson.loads(reply)["error"]["message"], data
        answered += status == 200
    assert 0 < answered < len(seen)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"messages": "\\ud800"}',
        b"\xff\xfe",
        b'{"messages": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "input": "x", "tools": [{"name": "f", '
        b'"input_schema": ' + DEEP + b', "parameters": ' + DEEP + b"}]}",
        b'{"n": 1e999, "max_tokens": 1e400}',
    ],
)
async def test_body_that_is_not_a_request_is_refused(
    proxy: RunningProxy, route: str, data: bytes
) -> None:
    session = await proxy.session()
    status, reply = await proxy.post(session, route, data)
    assert status == 400
    assert reply["error"]["message"]


async def test_body_beyond_the_limit_gets_413(start_proxy: Any) -> None:
    proxy = await start_proxy(limits={"body_bytes": 2048})
    session = await proxy.session()
    status, reply = await proxy.post(session, "chat/completions", b'{"a": "' + b"x" * 4000 + b'"}')
    assert status == 413
    assert "limits.body_bytes" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", 3, "from 0 to 2"),
        ("n", 0, "from 1 to 64"),
        ("max_tokens", "many", "an integer"),
        ("stop", [""], "1 to 1000 characters"),
        ("messages", [], "at least one message"),
        ("tool_choice", "maybe", "auto, none, required"),
    ],
)
async def test_refusal_names_field_value_and_limit(
    proxy: RunningProxy, field: str, value: object, says: str
) -> None:
    session = await proxy.session()
    body = {"messages": [{"role": "user", "content": "Hi."}], field: value}
    status, reply = await proxy.post(session, "chat/completions", body)
    assert status == 400
    assert reply["error"]["param"] == field
    assert says in reply["error"]["message"]
    assert orjson.dumps(value).decode() in reply["error"]["message"]


@pytest.mark.parametrize("route", ["messages/count_tokens", "chat/completions"])
async def test_image_is_shown_as_text(proxy: RunningProxy, route: str) -> None:
    session = await proxy.session()
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]}
    status, reply = await proxy.post(session, route, body)
    assert status == 200, reply


@pytest.mark.parametrize("route", ROUTES[:-1])
@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("logit_bias", {"50256": -100}, {}),
        ("min_tokens", 5, 0),
        ("ignore_eos", True, False),
        ("chat_template_kwargs", {"enable_thinking": False}, {}),
        ("functions", [{"name": "f", "parameters": {}}], []),
        ("guided_regex", "[ab]", None),
    ],
)
async def test_unsupported_sampling_parameter_is_refused(
    proxy: RunningProxy, route: str, field: str, value: object, neutral: object
) -> None:
    session = await proxy.session(SessionKind.EVAL)
    # `prompt` of Responses is one of the provider's own, which is refused, too.
    valid = {name: given for name, given in VALID.items() if (route, name) != RESPONSES_PROMPT}
    status, reply = await proxy.post(session, route, valid | {field: value})
    assert status == 400
    assert f"{field}: expected no value" in reply["error"]["message"]
    assert (await proxy.post(session, route, valid | {field: neutral}))[0] == 200


async def test_arguments_nested_too_deep_are_sent_unchanged(proxy: RunningProxy) -> None:
    """A broken policy may sample thousands of brackets."""
    session = await proxy.session()
    deep = "[" * 2000 + "]" * 2000
    proxy.answers(f'<tool_call>\n{{"name": "f", "arguments": {{"a": {deep}}}}}\n</tool_call>')
    asked = {**VALID, "max_tokens": 20_000}
    status, reply = await proxy.post(session, "chat/completions", asked)
    assert (status, deep in reply["choices"][0]["message"]["content"]) == (200, True)
    events = await proxy.events(session, "chat/completions", {**asked, "stream": True})
    assert events[-1] == b"data: [DONE]"
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns if turn.status is TurnStatus.CUT] == []
