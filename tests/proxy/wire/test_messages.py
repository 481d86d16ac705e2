"""Anthropic Messages in the forms that Claude Code sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.config import RenderingConfig
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.conftest import RunningProxy

TOOL = {"name": "shell", "description": "Runs.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
BILLING = "x-anthropic-billing-header: cc_version=2; cch={}"


def body(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": "claude-x", "max_tokens": 100, "tools": [TOOL], "messages": messages, **more}


def assembled(events: list[bytes]) -> dict[str, Any]:
    """The message that a client assembles from a stream."""
    message: dict[str, Any] = {}
    arguments: dict[int, str] = {}
    for event in events:
        name, _, line = event.partition(b"\n")
        data = orjson.loads(line.removeprefix(b"data: "))
        assert name == b"event: " + data["type"].encode()
        if data["type"] == "message_start":
            message = data["message"]
        elif data["type"] == "content_block_start":
            assert data["index"] == len(message["content"])
            message["content"].append(data["content_block"])
        elif data["type"] == "content_block_delta":
            block, delta = message["content"][data["index"]], data["delta"]
            if delta["type"] == "input_json_delta":
                arguments[data["index"]] = arguments.get(data["index"], "") + delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                block[kind] += delta[kind]
        elif data["type"] == "message_delta":
            message |= data["delta"]
            message["usage"] = data["usage"]
    for index, text in arguments.items():
        message["content"][index]["input"] = orjson.loads(text)
    assert events[-1].startswith(b"event: message_stop")
    return message


async def test_conversation_with_tools_is_one_path(proxy: RunningProxy) -> None:
    """`cache_control` moves, text becomes blocks, and a billing header changes."""
    session = await proxy.session()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
    for turn, answer in enumerate((f"Let me look.\n{CALL}\n{CALL}", CALL, "Done.")):
        proxy.answers(answer)
        system = [
            {"type": "text", "text": BILLING.format(turn)},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ]
        status, reply = await proxy.post(
            session, "messages?beta=true", body(messages, system=system)
        )
        assert status == 200, reply
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": [{"type": "text", "text": f"result {i}"}],
                "cache_control": {"type": "ephemeral"},
            }
            for i, block in enumerate(reply["content"])
            if block["type"] == "tool_use"
        ]
        messages[0]["content"] = [{"type": "text", "text": "List the files."}]
        messages += [{"role": "assistant", "content": reply["content"]}]
        messages += [{"role": "user", "content": results}]
    assert reply["stop_reason"] == "end_turn"
    assert reply["model"] == "claude-x"

    _, turns = await proxy.record(session)

    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.fork_cause for turn in turns] == [None, None, None]
    assert turns[2].prompt_tokens == len(proxy.engine.calls[2].prompt_ids)


async def test_stream_and_whole_answer_have_the_same_content(proxy: RunningProxy) -> None:
    proxy.answers(f"<think>\nI want to see.\n</think>\n\nLet me look.\n{CALL}")
    request = body([{"role": "user", "content": "Hi."}], thinking={"type": "adaptive"})
    whole_session, stream_session = await proxy.session(), await proxy.session()
    _, whole = await proxy.post(whole_session, "messages", request)

    events = await proxy.events(stream_session, "messages", {**request, "stream": True})

    message = assembled(events)
    for reply in (whole, message):
        reply.pop("id")
        reply["content"][-1].pop("id")
    assert message == whole
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]


async def test_text_after_a_streamed_call_continues_the_path(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(f"Let me look.\n{CALL}\n<tool_call>\nls\n</tool_call>")
    asked = [{"role": "user", "content": "List the files."}]
    events = await proxy.events(session, "messages", body(asked, stream=True))
    content = assembled(events)["content"]
    assert [block["type"] for block in content] == ["text", "tool_use", "text"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "a b"}
    history = [
        *asked,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    status, _ = await proxy.post(session, "messages", body(history))
    _, turns = await proxy.record(session)
    assert (status, turns[1].fork_cause) == (200, None)


async def test_reasoning_is_sent_only_on_request_but_kept_for_the_model(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    proxy.answers("<think>\nI want to see.\n</think>\n\nHello.")
    messages = [{"role": "user", "content": "Hi."}]
    _, reply = await proxy.post(session, "messages", body(messages))
    assert reply["content"] == [{"type": "text", "text": "Hello."}]

    messages += [
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": "More."},
    ]
    await proxy.post(session, "messages", body(messages))

    _, turns = await proxy.record(session)
    assert turns[1].fork_cause is None
    assert turns[1].shared_tokens == turns[0].path_tokens


async def test_counting_tokens_records_no_turn(proxy: RunningProxy) -> None:
    session = await proxy.session()
    request = body([{"role": "user", "content": "Hi."}])
    _, count = await proxy.post(session, "messages/count_tokens?beta=true", request)
    _, reply = await proxy.post(session, "messages", request)

    assert count["input_tokens"] == reply["usage"]["input_tokens"]
    assert len((await proxy.record(session))[1]) == 1


async def test_count_has_the_reasoning_that_the_recorded_path_keeps(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers("<think>\nLet me think about this for quite a while.\n</think>\n\nDone.")
    request = body([{"role": "user", "content": "Hi."}])
    _, reply = await proxy.post(session, "messages", request)
    said = [block for block in reply["content"] if block["type"] == "text"]
    request["messages"] += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And now?"},
    ]
    counts = [(await proxy.post(session, "messages/count_tokens", request))[1] for _ in range(2)]
    _, reply = await proxy.post(session, "messages", request)
    usage = reply["usage"]
    whole = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counts == [{"input_tokens": whole}] * 2
    _, turns = await proxy.record(session)
    assert turns[1].shared_tokens == turns[0].path_tokens


async def test_overlong_prompt_gets_the_error_on_which_claude_compacts(proxy: RunningProxy) -> None:
    session = await proxy.session()
    status, reply = await proxy.post(
        session, "messages", body([{"role": "user", "content": "word " * 60_000}])
    )
    assert status == 400
    assert reply["type"] == "error"
    assert reply["error"]["message"].startswith("prompt is too long: ")
    assert reply["error"]["message"].endswith(" tokens > 32768 maximum")


async def test_text_ends_before_a_stop_sequence(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers("Let me look.\nSTOP here and there")
    request = body([{"role": "user", "content": "Hi."}], stop_sequences=["STOP"], stream=True)

    message = assembled(await proxy.events(session, "messages", request))

    assert message["content"] == [{"type": "text", "text": "Let me look."}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")


async def test_forced_call_does_not_disable_reasoning(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers(f"<think>\nHm.\n</think>\n\n{CALL}")
    request = body(
        [{"role": "user", "content": "Hi."}],
        tool_choice={"type": "any"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    _, reply = await proxy.post(session, "messages", request)
    assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use"]
    _, (turn,) = await proxy.record(session)
    assert "</think>" not in proxy.rendering.tokenizer.decode(turn.prompt_ids)


async def test_beginning_of_a_forced_call_is_not_sampled(
    start_proxy: Any, checkpoint: Path
) -> None:
    silent = RenderingConfig(renderer="qwen3", template_kwargs={"enable_thinking": False})
    proxy: RunningProxy = await start_proxy(rendering=silent.model_dump())
    session = await proxy.session()
    proxy.answers(' {"command": "ls"}}\n</tool_call>')
    request = body(
        [{"role": "user", "content": "Hi."}], tool_choice={"type": "tool", "name": "shell"}
    )

    _, reply = await proxy.post(session, "messages", request)

    assert reply["stop_reason"] == "tool_use"
    (block,) = reply["content"]
    assert (block["name"], block["input"]) == ("shell", {"command": "ls"})
    _, (turn,) = await proxy.record(session)
    assert turn.sampled_ids.tolist() == proxy.engine.calls[0].answer_ids
    opening = Rendering(load_tokenizer(checkpoint), silent).opening("shell").tolist()
    assert opening
    assert turn.prompt_ids[-len(opening) :].tolist() == opening

    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "a b"}
    request["messages"] += [
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]
    del request["tool_choice"]
    proxy.answers("Done.")
    await proxy.post(session, "messages", request)
    _, turns = await proxy.record(session)
    assert turns[1].shared_tokens == turns[0].path_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_with_a_prefill_is_continued(proxy: RunningProxy, stream: bool) -> None:
    """Anthropic's prefill: the model gets the beginning and samples the rest; the agent gets the
    rest, and continues from both."""
    session = await proxy.session()
    proxy.answers(" a sum of two numbers")
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "The answer is"},
    ]
    if stream:
        request = body(messages, stream=True)
        reply = assembled(await proxy.events(session, "messages", request))
    else:
        _, reply = await proxy.post(session, "messages", body(messages))
    assert reply["content"] == [{"type": "text", "text": " a sum of two numbers"}]
    _, (turn,) = await proxy.record(session)
    decode = proxy.rendering.tokenizer.decode
    assert decode(turn.prompt_ids.tolist()).endswith("The answer is")
    assert turn.sampled_ids.tolist() == proxy.engine.calls[0].answer_ids

    messages[1]["content"] += reply["content"][0]["text"]
    proxy.answers("Done.")
    await proxy.post(session, "messages", body([*messages, {"role": "user", "content": "More."}]))
    _, turns = await proxy.record(session)
    assert turns[1].fork_cause is None
    assert turns[1].shared_tokens == turns[0].path_tokens


async def test_call_without_its_result_cannot_be_continued(proxy: RunningProxy) -> None:
    session = await proxy.session()
    use = {"type": "tool_use", "id": "toolu_1", "name": "shell", "input": {}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": [use]},
    ]
    status, reply = await proxy.post(session, "messages", body(messages))
    assert (status, "tool_use" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_ends_after_one_call_if_parallel_calls_are_disabled(
    proxy: RunningProxy, stream: bool
) -> None:
    session = await proxy.session()
    proxy.answers(f"Let me look.\n{CALL}\n{CALL}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    request = body([{"role": "user", "content": "Hi."}], tool_choice=choice, stream=stream)
    if stream:
        reply = assembled(await proxy.events(session, "messages", request))
    else:
        _, reply = await proxy.post(session, "messages", request)
    assert [block["type"] for block in reply["content"]] == ["text", "tool_use"]
    assert reply["stop_reason"] == "tool_use"

    result = {"type": "tool_result", "tool_use_id": reply["content"][1]["id"], "content": "a b"}
    request["messages"] += [
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": [result]},
    ]
    proxy.answers("Done.")
    await proxy.post(session, "messages", {**request, "stream": False})
    _, turns = await proxy.record(session)
    assert turns[1].shared_tokens == turns[0].path_tokens


async def test_truncated_call_is_sent_up_to_its_end(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers('<tool_call>\n{"name": "shell", "arguments": {"command": "ls -la')
    request = body([{"role": "user", "content": "Hi."}], max_tokens=40, stream=True)
    events = await proxy.events(session, "messages", request)
    sent = [orjson.loads(event.partition(b"data: ")[2]) for event in events]
    pieces = [e["delta"]["partial_json"] for e in sent if e["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"command": "ls -la'


async def test_returned_arguments_that_are_not_json_are_the_same_call(proxy: RunningProxy) -> None:
    session = await proxy.session()
    proxy.answers('<tool_call>\n{"name": "shell", "arguments": {"command": ls}}\n</tool_call>')
    request = body([{"role": "user", "content": "Hi."}])
    _, reply = await proxy.post(session, "messages", request)
    (block,) = reply["content"]
    assert block["input"] == {"arguments": '{"command": ls}'}

    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "no JSON"}
    request["messages"] += [
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]
    await proxy.post(session, "messages", request)
    _, turns = await proxy.record(session)
    assert turns[1].shared_tokens == turns[0].path_tokens


async def test_tool_that_is_not_offered_cannot_be_forced(proxy: RunningProxy) -> None:
    session = await proxy.session()
    request = body([{"role": "user", "content": "Hi."}])
    other = {"tool_choice": {"type": "tool", "name": "other"}}
    for more in (other, {"tools": list[Any]()}):
        asked = {**request, "tool_choice": {"type": "any"}, **more}
        status, reply = await proxy.post(session, "messages", asked)
        assert (status, "tool_choice" in reply["error"]["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_in_a_prefill_does_not_end_the_answer(
    proxy: RunningProxy, stream: bool
) -> None:
    """The usual way to get bare JSON: a prefill that opens a code block, and a stop sequence that
    closes it."""
    session = await proxy.session()
    proxy.answers('\n{"sum": 5}\n``` Is this right?')
    messages = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "Well: ```json"},
    ]
    request = body(messages, stop_sequences=["```"], stream=stream)
    if stream:
        reply = assembled(await proxy.events(session, "messages", request))
    else:
        _, reply = await proxy.post(session, "messages", request)
    assert reply["content"] == [{"type": "text", "text": '\n{"sum": 5}'}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "```")
    retry = {"x-stainless-retry-count": "1"}
    _, again = await proxy.post(session, "messages", {**request, "stream": False}, **retry)
    assert [again[name] for name in ("content", "stop_sequence")] == [
        reply[name] for name in ("content", "stop_sequence")
    ]
