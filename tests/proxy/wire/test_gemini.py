"""Google's generateContent: what it asks, what it gets, and that stream and body agree."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.client import SessionHandle
from proxy.errors import RequestError
from proxy.wire.body import Body, parse_body
from proxy.wire.gemini import GeminiDialect, addressed, json_schema
from tests.proxy.conftest import RunningProxy, StartProxy

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
SHELL = {
    "name": "shell",
    "description": "Runs.",
    "parameters": {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}},
}
ASKED: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [{"role": "user", "parts": [{"text": "Hi."}]}],
    "tools": [{"functionDeclarations": [SHELL]}, {"googleSearch": {}}],
    "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
}
SAID = [
    "Hello.",
    "<think>\nHm.\n</think>\n\nHello 😀.",
    "Let me look.\n" + CALL + "\n" + CALL,
    "<think>\nHm.\n</think>\n\n" + CALL,
    "",
]


async def ask(
    proxy: RunningProxy,
    session: SessionHandle,
    body: Any,
    method: str = "generateContent",
    query: str = "",
) -> tuple[int, bytes]:
    root = session.base_url.removesuffix("/v1")
    url = f"{root}/v1beta/models/gemini-x:{method}{query}"
    headers = {"x-goog-api-key": session.api_key}
    async with proxy.http.post(url, data=orjson.dumps(body), headers=headers) as response:
        return response.status, await response.read()


def joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adjacent texts of one kind as one part; call ids are random."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if "functionCall" in part:
            part["functionCall"].pop("id", None)
        elif out and "text" in out[-1] and out[-1].get("thought") == part.get("thought"):
            out[-1]["text"] += part["text"]
            continue
        if part.get("text") != "":
            out.append(part)
    return out


def streamed(data: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parts of all chunks, and the last chunk."""
    chunks = [orjson.loads(event[6:]) for event in data.split(b"\r\n\r\n") if event.strip()]
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    return parts, chunks[-1]


@pytest.mark.parametrize("said", SAID)
async def test_stream_and_body_have_the_same_content(proxy: RunningProxy, said: str) -> None:
    proxy.answers(said)
    status, data = await ask(proxy, await proxy.session(), ASKED)
    assert status == 200, data
    whole = orjson.loads(data)
    status, data = await ask(
        proxy, await proxy.session(), ASKED, "streamGenerateContent", "?alt=sse"
    )
    assert status == 200, data
    parts, last = streamed(data)
    candidate = whole["candidates"][0]
    assert joined(parts) == joined(candidate["content"]["parts"])
    assert candidate["finishReason"] == last["candidates"][0]["finishReason"] == "STOP"
    assert whole["usageMetadata"] == last["usageMetadata"]
    assert whole["modelVersion"] == last["modelVersion"] == "gemini-x"
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    assert len(calls) == said.count("<tool_call>")
    assert all(call["args"] == {"command": "ls"} for call in calls)
    status, data = await ask(proxy, await proxy.session(), ASKED, "streamGenerateContent")
    (listed,) = orjson.loads(data)
    assert joined(listed["candidates"][0]["content"]["parts"]) == joined(
        candidate["content"]["parts"]
    )


async def test_history_extends_with_calls_and_results_in_any_form(proxy: RunningProxy) -> None:
    proxy.answers(lambda prompt: "Done." if "tool_response" in prompt else "Look.\n" + CALL + CALL)
    for with_ids in (True, False):
        session = await proxy.session()
        _, data = await ask(proxy, session, ASKED)
        content = orjson.loads(data)["candidates"][0]["content"]
        calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        results = [
            {"id": call["id"], "name": "shell", "response": {"output": f"file {at}"}}
            for at, call in enumerate(calls)
        ]
        if not with_ids:
            for each in [*calls, *results]:
                del each["id"]
        answered = [{"functionResponse": result} for result in results]
        body = {
            **ASKED,
            "contents": [*ASKED["contents"], content, {"role": "user", "parts": answered}],
        }
        status, data = await ask(proxy, session, body)
        assert status == 200, data
        _, turns = await proxy.record(session)
        assert [turn.fork_cause for turn in turns] == [None, None]
        assert turns[1].dialect == "gemini"
        written = proxy.rendering.tokenizer.decode(turns[1].prompt_ids.tolist())
        assert written.index("file 0") < written.index("file 1")


async def test_key_may_stand_in_the_query_and_errors_have_googles_shape(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(max_context_tokens=500)
    session = await proxy.session()
    url = f"{proxy.url}/v1beta/models/m:generateContent"
    async with proxy.http.post(f"{url}?key={session.api_key}", json=ASKED) as response:
        assert response.status == 200
    async with proxy.http.post(url, json=ASKED) as response:
        assert response.status == 401
        assert (await response.json())["error"]["status"] == "UNAUTHENTICATED"
    long = {"contents": [{"parts": [{"text": "a b " * 500}]}]}
    status, data = await ask(proxy, session, long)
    error = orjson.loads(data)["error"]
    assert (status, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert "exceeds the maximum number of tokens allowed (500)" in error["message"]


async def test_tokens_are_counted_as_they_are_sampled_from(proxy: RunningProxy) -> None:
    session = await proxy.session()
    _, data = await ask(proxy, session, ASKED)
    prompt = orjson.loads(data)["usageMetadata"]["promptTokenCount"]
    for body in (ASKED, {"generateContentRequest": ASKED}):
        status, data = await ask(proxy, session, body, "countTokens")
        assert (status, orjson.loads(data)) == (200, {"totalTokens": prompt})


def parsed(**change: Any) -> Any:
    return GeminiDialect("m").parse(parse_body(Body(orjson.dumps(ASKED | change))), {})


def test_request_is_read_by_both_forms_of_its_names() -> None:
    config = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 5,
        "maxOutputTokens": 7,
        "stopSequences": ["x"],
        "candidateCount": 2,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
    }
    mode = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["shell"]}}
    call = parsed(generationConfig=config, toolConfig=mode)
    options = call.options
    assert (options.temperature, options.top_p, options.top_k) == (0.5, 0.9, 5)
    assert (options.max_tokens, options.stop, call.n) == (7, ("x",), 2)
    assert options.forced is not None
    assert options.forced.name == "shell"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert options.structured == {"json": schema}
    (tool,) = call.conversation.tools
    assert tool["function"]["parameters"]["properties"] == {"command": {"type": "string"}}
    snake = {
        "system_instruction": ASKED["systemInstruction"],
        "contents": ASKED["contents"],
        "tools": [{"function_declarations": [SHELL]}],
        "generation_config": {"max_output_tokens": 7, "top_k": 5},
    }
    other = GeminiDialect("m").parse(parse_body(Body(orjson.dumps(snake))), {})
    assert other.conversation == call.conversation
    assert (other.options.max_tokens, other.options.top_k) == (7, 5)


def test_unknown_names_are_told_and_unsupported_ones_refused() -> None:
    assert parsed(whatever=1, generationConfig={"x": 1}).unknown == (
        "whatever",
        "generationConfig.x",
    )
    refused: list[dict[str, Any]] = [
        {"cachedContent": "cachedContents/1"},
        {"generationConfig": {"responseModalities": ["IMAGE"]}},
        {"generationConfig": {"temperature": 3}},
        {"generationConfig": {"responseMimeType": "text/x.enum"}},
        {"contents": []},
        {"contents": [{"role": "tool", "parts": []}]},
        {"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}},
    ]
    for change in refused:
        with pytest.raises(RequestError):
            parsed(**change)


def test_what_a_text_model_cannot_read_is_named() -> None:
    parts = [
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"executableCode": {"language": "PYTHON", "code": "1"}},
    ]
    (_, user) = parsed(contents=[{"parts": parts}]).conversation.messages
    assert "image/png" in user.text
    assert "PYTHON" in user.text
    assert "AAAA" not in user.text


def test_nullable_becomes_a_union() -> None:
    schema = {"type": "STRING", "nullable": True, "enum": ["STRING"], "description": "D"}
    converted = json_schema({"type": "ARRAY", "items": schema})
    assert converted["items"] == {
        "type": ["string", "null"],
        "enum": ["STRING"],
        "description": "D",
    }


def test_paths_name_session_model_and_method() -> None:
    found = addressed("/trial-1/v1beta/models/a/b:countTokens", "")
    assert found is not None
    assert (found[0], found[1], found[2].counts) == ("trial-1", "models:countTokens", True)
    assert addressed("/v1/models/m", "") is None
    assert addressed("/v1beta/models/m:embedContent", "") is None


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=4)
NAMES = """
contents role parts text functionCall functionResponse name args response id tools inlineData
functionDeclarations parameters generationConfig thinkingConfig thought
"""
names = st.sampled_from(NAMES.split())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(names, values, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_body_is_parsed_or_refused(change: dict[str, Any]) -> None:
    try:
        call = parsed(**change)
    except RequestError:
        return
    assert call.conversation.messages


async def test_request_for_a_search_by_google_alone_is_refused(proxy: RunningProxy) -> None:
    session = await proxy.session()
    refused: list[Any] = [[{"googleSearch": {}}], [{"google_search": {}}, {"urlContext": {}}]]
    for tools in refused:
        status, body = await ask(proxy, session, ASKED | {"tools": tools})
        assert status == 400
        assert next(iter(tools[-1])) in orjson.loads(body)["error"]["message"]
    none: list[Any] = [[{"functionDeclarations": []}], []]
    for tools in none:
        assert (await ask(proxy, session, ASKED | {"tools": tools}))[0] == 200
