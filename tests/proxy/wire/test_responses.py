"""OpenAI Responses in the forms that the openai SDK and Codex send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.proxy.conftest import RunningProxy

TOOLS: list[Any] = [
    {"type": "function", "name": "shell", "parameters": {"type": "object"}},
    {"type": "custom", "name": "apply_patch", "description": "Patches."},
    {"type": "web_search"},
    {
        "type": "namespace",
        "name": "files",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
    },
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
async def client(proxy: RunningProxy) -> AsyncIterator[openai.AsyncOpenAI]:
    session = await proxy.session()
    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    client.trial_id = session.trial_id  # type: ignore[attr-defined]
    yield client
    await client.close()


async def turns_of(proxy: RunningProxy, client: openai.AsyncOpenAI) -> list[Any]:
    return (await proxy.control.get_turns(client.trial_id))[1]  # type: ignore[attr-defined]


async def test_returned_items_of_all_kinds_form_one_path(
    proxy: RunningProxy, client: openai.AsyncOpenAI
) -> None:
    proxy.answers(
        "<think>\nHm.\n</think>\n\nLet me look.\n"
        + call("shell", '{"command": "ls"}')
        + call("apply_patch", '{"input": "*** Begin"}')
        + call("files.read", '{"path": "a"}')
    )
    history: list[Any] = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ]
    async with client.responses.stream(
        model="m", input=history, tools=TOOLS, store=False
    ) as stream:
        async for _ in stream:
            pass
        response = await stream.get_final_response()

    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "custom_tool_call", "function_call"]
    shell, patch, read = response.output[2:]
    assert (shell.name, shell.arguments) == ("shell", '{"command": "ls"}')
    assert (patch.name, patch.input) == ("apply_patch", "*** Begin")
    assert (read.name, read.namespace) == ("read", "files")

    history += [item.model_dump(exclude_none=True) for item in response.output]
    history += [
        {"type": "function_call_output", "call_id": shell.call_id, "output": "a b"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "ok"},
        {"type": "function_call_output", "call_id": read.call_id, "output": "text"},
    ]
    proxy.answers("Done.")
    second = await client.responses.create(model="m", input=history, tools=TOOLS)
    assert second.output_text == "Done."
    turns = await turns_of(proxy, client)
    assert [turn.fork_cause for turn in turns] == [None, None]
    assert turns[1].shared_tokens == turns[0].path_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n  x \\n"}', "*** Begin\n  x \n"),
        ('{"input": ""}', ""),
        ('{"input": "{\\"patch\\": 1}"}', '{"patch": 1}'),
        ('{"input": "a", "why": "b"}', "a"),
        ('{"patch": "*** Begin"}', '{"patch": "*** Begin"}'),
        ('{"input": null}', '{"input": null}'),
        ('{"input": {"a": [1, true]}}', '{"input": {"a": [1, true]}}'),
        ('{"input": 5}', '{"input": 5}'),
        ("{}", "{}"),
        ('{"input": "a" b}', '{"input": "a" b}'),
    ],
)
async def test_free_form_call_has_one_text_and_comes_back_as_the_same_call(
    proxy: RunningProxy, client: openai.AsyncOpenAI, arguments: str, text: str, stream: bool
) -> None:
    proxy.answers(call("apply_patch", arguments))
    history: list[Any] = [{"role": "user", "content": "Patch."}]
    answer: Any = await client.responses.create(
        model="m", input=history, tools=TOOLS, stream=stream
    )
    if stream:
        events = [event async for event in answer]
        sent = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert "".join(sent) == text
        answer = events[-1].response
    (item,) = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", text)
    history.append(item.model_dump(exclude_none=True))
    history.append({"type": "custom_tool_call_output", "call_id": item.call_id, "output": "ok"})
    await client.responses.create(model="m", input=history, tools=TOOLS)
    turns = await turns_of(proxy, client)
    assert [turn.fork_cause for turn in turns] == [None, None]
    assert turns[1].shared_tokens == turns[0].path_tokens


async def test_text_after_a_streamed_call_continues_the_path(
    proxy: RunningProxy, client: openai.AsyncOpenAI
) -> None:
    proxy.answers(f"Let me look.\n{call('shell', '{}')}\n<tool_call>\nls\n</tool_call>")
    history: list[Any] = [{"role": "user", "content": "List the files."}]
    stream = await client.responses.create(model="m", input=history, tools=TOOLS, stream=True)
    response: Any = [event async for event in stream][-1]
    output = response.response.output
    assert [item.type for item in output] == ["message", "function_call", "message"]
    history += [item.model_dump(exclude_none=True) for item in output]
    history += [{"type": "function_call_output", "call_id": output[1].call_id, "output": "a b"}]
    await client.responses.create(model="m", input=history, tools=TOOLS)
    turns = await turns_of(proxy, client)
    assert turns[1].fork_cause is None


async def test_previous_response_id_continues_the_recorded_turn(
    proxy: RunningProxy, client: openai.AsyncOpenAI
) -> None:
    proxy.answers(call("shell", "{}"))
    first = await client.responses.create(
        model="m", instructions="Be brief.", input="List.", tools=TOOLS
    )
    (item,) = first.output
    proxy.answers("Done.")
    output: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "a b"}

    second = await client.responses.create(
        model="m",
        previous_response_id=first.id,
        instructions="Be brief.",
        input=[output],
        tools=TOOLS,
    )
    third = await client.responses.create(
        model="m", previous_response_id=second.id, input="Thanks."
    )

    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    turns = await turns_of(proxy, client)
    assert [turn.parent for turn in turns] == [None, 0, 1]
    assert [turn.fork_cause for turn in turns] == [None, None, None]
    text = proxy.rendering.tokenizer.decode(turns[1].prompt_ids)
    assert "<tool_response>\na b\n</tool_response>" in text


async def test_unknown_previous_response_is_refused(
    proxy: RunningProxy, client: openai.AsyncOpenAI
) -> None:
    for unknown in ("resp_7_x", "resp_x", "else", "resp_99999999999999_x"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", previous_response_id=unknown, input="Hi.")


async def test_websocket_request_gets_426(proxy: RunningProxy) -> None:
    url = f"{proxy.url}/v1/responses"
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    async with proxy.http.get(url, headers=headers) as response:
        assert response.status == 426


async def test_truncated_answer_has_status_incomplete(
    proxy: RunningProxy, client: openai.AsyncOpenAI
) -> None:
    proxy.answers("The answer is a sum of two numbers, thank you.")
    response = await client.responses.create(model="m", input="Hi.", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
