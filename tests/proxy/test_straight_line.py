"""An agent's calls through the whole proxy are recorded exactly, and each turn extends the last."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from proxy.records import FinishReason, SessionKind, TurnStatus
from proxy.testing.scripted_engine import scripted_logprob
from proxy.token_tree.tree import TokenTree
from tests.proxy.conftest import RunningProxy

CHAT = "chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'


def chat(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": "some-model", "messages": messages, "tools": [TOOL], **more}


async def test_conversation_with_tools_is_one_path(proxy: RunningProxy) -> None:
    proxy.engine.expect_extension = True
    session = await proxy.session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
    for answer in (f"Let me look.\n{CALL}", CALL, "Done, thank you."):
        proxy.answers(answer)
        status, reply = await proxy.post(session, CHAT, chat(messages))
        assert status == 200, reply
        message = reply["choices"][0]["message"]
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "a b c"}
            for call in message.get("tool_calls", ())
        ]
    assert reply["model"] == "some-model"
    assert reply["choices"][0]["finish_reason"] == "stop"

    _, turns = await proxy.record(session)

    assert proxy.engine.violations == []
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.fork_cause for turn in turns] == [None] * 3
    assert [turn.finish_reason for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    assert all(turn.status is TurnStatus.DONE for turn in turns)
    tree = TokenTree(turns)
    for turn, call in zip(turns, proxy.engine.calls, strict=True):
        prompt = tree.path(turn.index)[: turn.prompt_tokens]
        assert prompt.tolist() == call.prompt_ids
        assert turn.sampled_ids.tolist() == call.answer_ids
        path = [call.prompt_ids[-1], *call.answer_ids]
        expected = [scripted_logprob(a, b) for a, b in zip(path, call.answer_ids, strict=False)]
        assert np.array_equal(turn.logprobs, np.array(expected, np.float32))


async def test_stream_and_whole_answer_have_the_same_content(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(f"<think>\nI want to see.\n</think>\n\nLet me look.\n{CALL}\n{CALL}")
    messages = [{"role": "user", "content": "List the files."}]
    _, whole = await proxy.post(session, CHAT, chat(messages))
    streamed = chat(messages, stream=True, stream_options={"include_usage": True})

    events = await proxy.events(session, CHAT, streamed)

    assert events[-1] == b"data: [DONE]"
    chunks = [orjson.loads(event[6:]) for event in events[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    want = whole["choices"][0]["message"]
    assert "".join(d.get("content") or "" for d in deltas) == want["content"] == "Let me look."
    reasoning = "".join(d.get("reasoning_content") or "" for d in deltas)
    assert reasoning == want["reasoning_content"] == "I want to see."
    calls: list[dict[str, str]] = []
    pieces = [call for d in deltas for call in d.get("tool_calls", ())]
    for piece in pieces:
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append(dict(piece["function"]))
        else:
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert calls == [c["function"] for c in want["tool_calls"]]
    assert len(pieces) > 6  # arguments are streamed while they are sampled
    assert chunks[-1]["usage"] == whole["usage"] | {
        "prompt_tokens_details": {
            "cached_tokens": chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        }
    }
    assert len(deltas) > 10


async def test_end_of_turn_of_a_truncated_answer_counts_as_prompt(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers("The answer is a sum of two numbers, thank you.")
    messages = [{"role": "user", "content": "Say something long."}]
    _, reply = await proxy.post(session, CHAT, chat(messages, max_tokens=4))
    assert reply["choices"][0]["finish_reason"] == "length"
    messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]

    await proxy.post(session, CHAT, chat(messages))

    _, turns = await proxy.record(session)
    close = proxy.rendering.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turns[0].finish_reason is FinishReason.LENGTH
    assert len(turns[0].sampled_ids) == 4
    assert turns[1].parent == 0
    assert turns[1].shared_tokens == turns[0].path_tokens
    assert turns[1].prompt_ids[0] == close


async def test_train_session_pins_sampling_and_eval_session_uses_the_agents(
    proxy: RunningProxy,
) -> None:
    body = chat([{"role": "user", "content": "Hi."}], temperature=0.0, top_p=0.5, seed=7)
    train = await proxy.session(SessionKind.TRAIN, sampling={"temperature": 1.0})
    evaluation = await proxy.session(SessionKind.EVAL)

    await proxy.post(train, CHAT, body)
    await proxy.post(evaluation, CHAT, body)

    pinned, honoured = (call.sampling for call in proxy.engine.calls)
    assert (pinned["temperature"], pinned["top_p"], pinned.get("seed")) == (1.0, 1.0, None)
    assert (honoured["temperature"], honoured["top_p"], honoured["seed"]) == (0.0, 0.5, 7)


async def test_seeds_of_calls_depend_on_session_and_prompt_and_not_on_order(
    proxy: RunningProxy,
) -> None:
    async def seeds(session_seed: int, said: list[str]) -> list[int]:
        session = await proxy.session(sampling={"seed": session_seed})
        for text in said:
            await proxy.post(session, CHAT, chat([{"role": "user", "content": text}]))
        calls = [call.sampling["seed"] for call in proxy.engine.calls]
        _, turns = await proxy.record(session)
        assert [turn.sampling["seed"] for turn in turns] == calls
        proxy.engine.calls.clear()
        return calls

    one, two, again = await seeds(7, ["One.", "Two.", "One."])
    assert await seeds(7, ["Two.", "One."]) == [two, one]
    assert len({one, two, again, *await seeds(8, ["One.", "Two."])}) == 5


async def test_several_choices_are_siblings(proxy: RunningProxy) -> None:
    session = await proxy.session()
    body = chat([{"role": "user", "content": "Hi."}], n=3)

    _, reply = await proxy.post(session, CHAT, body)

    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None, "sibling", "sibling"]
    assert [len(turn.prompt_ids) > 0 for turn in turns] == [True, False, False]
    assert len({tuple(call.prompt_ids) for call in proxy.engine.calls}) == 1


async def test_overlong_prompt_gets_the_error_on_which_agents_compact(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    body = chat([{"role": "user", "content": "word " * 60_000}])

    status, reply = await proxy.post(session, CHAT, body)

    assert status == 400
    assert reply["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 32768 tokens" in reply["error"]["message"]
    assert (await proxy.record(session))[1] == []
