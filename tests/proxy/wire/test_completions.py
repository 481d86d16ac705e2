"""OpenAI Completions: prompts without messages."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.proxy.conftest import RunningProxy

ROUTE = "completions"


async def test_prompt_that_continues_an_answer_extends_its_turn(proxy: RunningProxy) -> None:
    session = await proxy.session()
    prompt = "The answer is"
    for answer in (" a sum of two", " numbers"):
        proxy.answers(answer)
        body = {"prompt": prompt, "max_tokens": 50}
        _, reply = await proxy.post(session, ROUTE, body)
        assert reply["choices"][0]["text"] == answer
        prompt += reply["choices"][0]["text"] + ", thank you."

    _, turns = await proxy.record(session)

    assert turns[1].parent == 0
    assert (
        turns[1].shared_tokens == turns[0].path_tokens - 1
    )  # all but the sampled end-of-turn token
    text = proxy.rendering.tokenizer.decode(proxy.engine.calls[1].prompt_ids)
    assert text == "The answer is a sum of two, thank you."


async def test_prompt_ids_are_sent_unchanged(proxy: RunningProxy) -> None:
    session = await proxy.session()
    ids = proxy.rendering.tokenizer.encode("The answer is")
    await proxy.post(session, ROUTE, {"prompt": ids, "max_tokens": 2})
    longer = [*ids, *proxy.engine.calls[0].answer_ids, 5]
    await proxy.post(session, ROUTE, {"prompt": longer, "max_tokens": 2})

    assert proxy.engine.calls[0].prompt_ids == ids
    assert proxy.engine.calls[1].prompt_ids == longer
    _, turns = await proxy.record(session)
    assert (turns[1].parent, turns[1].prompt_ids.tolist(), turns[1].fork_cause) == (0, [5], None)


async def test_stream_and_whole_answer_have_the_same_content(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers("  two words \n")
    body: dict[str, Any] = {"prompt": "Say", "max_tokens": 50, "logprobs": 1, "echo": False}
    _, whole = await proxy.post(session, ROUTE, body)
    proxy.engine.token_delay_s = 0.005  # so that the stream is in several pieces
    events = await proxy.events(session, ROUTE, {**body, "stream": True})

    chunks = [orjson.loads(event[6:]) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    want = whole["choices"][0]
    text = "  two words \n"
    assert "".join(c["text"] for c in choices) == want["text"] == text
    for part in ("tokens", "token_logprobs", "text_offset"):
        streamed = [each for c in choices if c["logprobs"] for each in c["logprobs"][part]]
        assert streamed == want["logprobs"][part]
    said = want["logprobs"]
    for token, at in zip(said["tokens"][:-1], said["text_offset"], strict=False):
        assert text[at:].startswith(token)
    assert choices[-1]["finish_reason"] == want["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", [None, "", [], [[1], [2]], ["a", "b"], [1, "a"], [-1], [True]])
async def test_invalid_prompts_are_refused(proxy: RunningProxy, prompt: object) -> None:
    session = await proxy.session()
    status, reply = await proxy.post(session, ROUTE, {"prompt": prompt})
    assert status == 400
    assert reply["error"]["param"] == "prompt"
