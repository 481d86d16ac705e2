"""Log-probabilities that an agent gets: those of the tokens of the text, in stream and body."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engines.protocol import Chunk
from proxy.rendering.deltas import Delta, TextDelta
from proxy.rendering.rendering import Rendering
from proxy.rendering.stream import AnswerParser
from proxy.serving.text_tokens import TextTokens, reasoning_tokens
from tests.proxy.conftest import RunningProxy
from tests.proxy.wire.test_gemini import ask

CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}}
WORDS = ["Hm", " ", "\n", "<think>", "</think>", "été 😀", "a <b", "<tool_call>"]
ANSWERS = [
    "Hello there.",
    "<think>\nHello there.\n</think>\n\nHello there. ",
    "<think>\nHm.\n</think>\n\nFamily 👩‍👩‍👧 数学 été.\n\n" + CALL,
    "  Let me look.\n" + CALL + "\n" + CALL,
    CALL,
    "<think>\nHm.\n</think>\n\n",
    "A 😀STOP and more",
    "<tool_call>\nnot a call\n</tool_call>",
]


def asked(route: str, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "stream": stream}
    if route == "responses":
        tool = {"type": "function", "name": "shell", "parameters": SHELL}
        return {
            **body,
            "input": "Hi.",
            "include": ["message.output_text.logprobs"],
            "tools": [tool],
        }
    tool = {"type": "function", "function": {"name": "shell", "parameters": SHELL}}
    message = {"role": "user", "content": "Hi."}
    return {**body, "messages": [message], "logprobs": True, "stop": ["STOP"], "tools": [tool]}


def body_of(route: str, answer: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Text and tokens of a whole answer."""
    if route == "responses":
        parts = [i["content"][0] for i in answer["output"] if i["type"] == "message"]
        text = "".join(part["text"] for part in parts)
        return text, [token for part in parts for token in part["logprobs"]]
    (choice,) = answer["choices"]
    return choice["message"]["content"] or "", choice["logprobs"]["content"]


def stream_of(route: str, events: list[bytes]) -> tuple[str, list[dict[str, Any]]]:
    """Text and tokens of the deltas of a stream, each of which must not precede its text."""
    text, tokens = "", []
    for event in events:
        data = event.partition(b"data: ")[2]
        if data == b"[DONE]":
            continue
        said = orjson.loads(data)
        if route == "responses" and said["type"] == "response.output_text.delta":
            text += said["delta"]
            tokens += said["logprobs"]
        for choice in said.get("choices", []):
            text += choice["delta"].get("content") or ""
            tokens += (choice["logprobs"] or {"content": []})["content"]
        assert text.startswith("".join(token["token"] for token in tokens))
    return text, tokens


@pytest.mark.parametrize("route", ["chat/completions", "responses"])
@pytest.mark.parametrize("said", ANSWERS)
async def test_tokens_are_the_text_in_stream_and_body(
    proxy: RunningProxy, route: str, said: str
) -> None:
    proxy.answers(said)
    bodies, session = [], await proxy.session()
    for _ in range(2):  # the second answer is the recorded one, sent again
        status, answer = await proxy.post(session, route, asked(route, stream=False))
        assert status == 200, answer
        bodies.append(body_of(route, answer))
    streamed = stream_of(
        route, await proxy.events(await proxy.session(), route, asked(route, stream=True))
    )
    (text, tokens), again = bodies
    assert "".join(token["token"] for token in tokens) == text
    assert b"".join(bytes(token["bytes"]) for token in tokens) == text.encode()
    assert streamed == again == (text, tokens)


@pytest.mark.parametrize("reasoning", ["Hm.", "Family 👩‍👩‍👧 数学 été, a <b.\n\nSo.", ""])
@pytest.mark.parametrize("route", ["chat/completions", "responses", "gemini"])
async def test_usage_has_the_tokens_of_the_reasoning(
    proxy: RunningProxy, route: str, reasoning: str
) -> None:
    """Also where the recorded answer is sent again."""
    proxy.answers(f"<think>\n{reasoning}\n</think>\n\nHello there.")
    own = len(proxy.rendering.tokenizer.encode(f"\n{reasoning}\n")) - 2 if reasoning else 0
    session = await proxy.session()
    for _ in range(2):
        if route == "gemini":
            body = {"contents": [{"role": "user", "parts": [{"text": "Hi."}]}]}
            usage = orjson.loads((await ask(proxy, session, body))[1])["usageMetadata"]
            found = usage["thoughtsTokenCount"]
            assert usage["totalTokenCount"] == (
                usage["promptTokenCount"] + usage["candidatesTokenCount"] + found
            )
        else:
            _, answer = await proxy.post(session, route, asked(route, stream=False))
            kind = "output" if route == "responses" else "completion"
            found = answer["usage"][f"{kind}_tokens_details"]["reasoning_tokens"]
        assert found == own


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_tokens_of_reasoning_are_those_that_its_text_needs(rendering: Rendering, data: Any) -> None:
    """The shortest run of tokens that has the whole reasoning."""
    words = st.lists(st.sampled_from(["Hm", " ", "\n", "été 😀", "数", "a <b", "."]), max_size=8)
    before, inner, after = ("".join(data.draw(words)) for _ in range(3))
    tokenizer = rendering.tokenizer
    ids = tokenizer.encode(f"<think>{before}A{inner}Z{after}</think>")
    found = reasoning_tokens(tokenizer, ids, f"A{inner}Z")
    decoded = [tokenizer.decode(ids[:size]) for size in range(len(ids) + 1)]
    end = next(size for size, text in enumerate(decoded) if f"A{inner}Z" in text)
    begin = next(at for at, text in enumerate(decoded) if text.startswith(f"<think>{before}A")) - 1
    assert found == end - begin


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_joined_tokens_are_the_text_in_every_split(rendering: Rendering, data: Any) -> None:
    words = st.sampled_from(
        ["Hm", " ", "\n", "<think>", "</think>", "été 😀", CALL, "a <b", "<tool_call>"]
    )
    ids = rendering.tokenizer.encode("".join(data.draw(st.lists(words, max_size=8))))
    ids.append(rendering.stop_token_ids[0])
    tool = [{"type": "function", "function": {"name": "shell", "parameters": SHELL}}]
    parser = AnswerParser(rendering, ids_of([]), tool, markers=rendering.markers)
    tokens, text, at = TextTokens(rendering.tokenizer), "", 0
    out = []
    while at < len(ids):
        size = data.draw(st.integers(1, 6))
        part = ids[at : at + size]
        deltas: list[Delta] = parser.feed(part)
        out += tokens.feed(Chunk(part, [-0.5] * len(part)), deltas)
        text += "".join(d.text for d in deltas if isinstance(d, TextDelta))
        assert text.startswith("".join(token.text for token in out))
        at += size
    rest, message = parser.finish()
    out += [*tokens.sent(rest), *tokens.end()]
    assert "".join(token.text for token in out).replace("\n", "") == message.text.replace("\n", "")


def ids_of(ids: list[int]) -> Any:
    return np.array(ids, np.int32)
