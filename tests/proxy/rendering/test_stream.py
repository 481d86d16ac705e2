"""The concatenated deltas of a stream are the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.conversation import Message, ToolCall
from proxy.rendering.deltas import ArgumentsDelta, Delta, ReasoningDelta, TextDelta, ToolCallStart
from proxy.rendering.rendering import Rendering
from proxy.rendering.stream import AnswerParser
from proxy.rendering.whole import WholeParser

PIECES = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "shell", "arguments": {"command": "ls"}}',
    '{"name": "shell", "arguments": 3}',
    '{"name": 5}',
    "<tool_call>\n",
    "\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "<think>\nI wonder.\n</think>\n\n",
    "Let me look.",
    " ",
    "\n",
    "\n\n",
    "été 数学",
    "STOP",
    "ST",
    "<|im_end|>",
    "<|im_start|>",
)


@st.composite
def answers(draw: st.DrawFn, rendering: Rendering) -> list[int]:
    """Ids of pieces in any order; some split the bytes of a character."""
    text = st.sampled_from(PIECES).map(rendering.tokenizer.encode)
    torn = st.sampled_from(rendering.tokenizer.encode("数é😀")).map(lambda i: [i])
    parts = draw(st.lists(text | text | text | torn, max_size=12))
    return [token for part in parts for token in part]


def put_together(deltas: list[Delta]) -> tuple[str, str, list[ToolCall]]:
    text = "".join(d.text for d in deltas if isinstance(d, TextDelta))
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    calls: list[ToolCall] = []
    for delta in deltas:
        if isinstance(delta, ToolCallStart):
            assert delta.index == len(calls)
            calls.append(ToolCall(delta.id, delta.name, ""))
        elif isinstance(delta, ArgumentsDelta):
            assert delta.index == len(calls) - 1
            calls[-1].arguments += delta.text
    return text, reasoning, calls


def without_ids(calls: list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>assistant\n",
        "<|im_start|>assistant\n<think>\n",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<think><|im_end|>\n<|im_start|>assistant\n",
    ],
)
def test_parsed_message_equals_the_renderers(rendering: Rendering, prompt: str) -> None:
    """Also if the answer is only text, which is parsed without the renderer."""
    prompt_end = np.array(rendering.tokenizer.encode(prompt), np.int32)

    @settings(max_examples=100, deadline=None)
    @given(answers(rendering))
    def check(ids: list[int]) -> None:
        read = rendering.parsed(ids, prompt_end, [])
        if read.tool_calls:
            return
        message = rendering.parse(ids, prompt_end, [], calls=True)
        assert message.text == (read.content or "").strip()
        assert message.reasoning == ((read.reasoning_content or "").strip() or None)

    check()


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"])
@pytest.mark.parametrize("stop", [(), ("STOP", "look")])
@pytest.mark.parametrize("calls", [True, False])
def test_concatenated_deltas_equal_the_parsed_message(
    rendering: Rendering, prompt: str, stop: tuple[str, ...], calls: bool
) -> None:
    markers = rendering.markers
    assert markers is not None
    prompt_end = np.array(rendering.tokenizer.encode(prompt), np.int32)
    more: dict[str, Any] = {"stop": stop, "calls": calls}

    @settings(max_examples=100, deadline=None)
    @given(answers(rendering), st.data())
    def check(ids: list[int], data: st.DataObject) -> None:
        streaming = AnswerParser(rendering, prompt_end, [], markers=markers, **more)
        deltas: list[Delta] = []
        at = 0
        while at < len(ids):
            size = data.draw(st.integers(1, 5))
            deltas += streaming.feed(ids[at : at + size])
            at += size
        rest, streamed = streaming.finish()
        whole = WholeParser(rendering, prompt_end, [], **more)
        whole.feed(ids)
        at_once, expected = whole.finish()

        text, reasoning, tool_calls = put_together(deltas + rest)
        assert (text, reasoning or None, tool_calls) == (
            streamed.text,
            streamed.reasoning,
            streamed.tool_calls,
        )
        assert (streamed.text, streamed.reasoning) == (expected.text, expected.reasoning)
        assert without_ids(streamed.tool_calls) == without_ids(expected.tool_calls)
        text, reasoning, tool_calls = put_together(at_once)
        assert (text, reasoning or None, tool_calls) == (
            expected.text,
            expected.reasoning,
            expected.tool_calls,
        )

    check()


def test_text_is_streamed_token_by_token(rendering: Rendering) -> None:
    parser = AnswerParser(rendering, np.zeros(0, np.int32), [], markers=rendering.markers)
    ids = rendering.tokenizer.encode("Let me look at the file, then say what it holds.")

    sent = [put_together(parser.feed([token]))[0] for token in ids]

    assert sum(bool(text) for text in sent) > len(ids) / 2
    assert "".join(sent) == "Let me look at the file, then say what it holds."


@pytest.mark.parametrize("stop", [(), ("STOP",)])
def test_plain_text_keeps_its_white_space(rendering: Rendering, stop: tuple[str, ...]) -> None:
    parser = AnswerParser(rendering, np.zeros(0, np.int32), [], markers=None, stop=stop, plain=True)
    deltas = parser.feed(rendering.tokenizer.encode("  a\n<think> b \nSTOP c"))
    rest, message = parser.finish()

    expected = "  a\n<think> b \n" + ("" if stop else "STOP c")
    assert message == Message("assistant", expected)
    assert put_together(deltas + rest)[0] == expected
    assert parser.stop_string == (stop[0] if stop else None)
