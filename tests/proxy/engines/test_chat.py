"""A hosted model behind `/v1/chat/completions`: agents use it as any model, and its sessions hold
the ids that the proxy's own model would have sampled to give the same answers
(`proxy.extras.engines.chat`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from proxy.records import FinishReason, SessionKind
from proxy.token_tree.rendered import are_tokens_of, rendered_turns
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.hosted_model import HostedModel, hosted_model

CHAT = "chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "shell", "description": "Runs it.", "parameters": {"type": "object"}},
    }
]
CALL = {
    "id": "toolu_01",
    "type": "function",
    "function": {"name": "shell", "arguments": '{"command": "ls"}'},
}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is in the folder?"},
]


@pytest.fixture
async def hosted() -> AsyncIterator[HostedModel]:
    async with hosted_model() as server:
        yield server


@pytest.fixture
async def proxy(start_proxy: StartProxy, hosted: HostedModel) -> RunningProxy:
    """A proxy whose only engine is the hosted model."""
    proxy = await start_proxy()
    for engine in await proxy.control.engines():
        await proxy.control.remove_engine(engine["name"])
    body = {"url": hosted.url, "kind": "chat", "model": "teacher-1", "api_key": "sk-hosted"}
    headers = {"Authorization": f"Bearer {proxy.control.admin_key}"}
    async with proxy.http.post(f"{proxy.url}/engines", json=body, headers=headers) as response:
        assert response.status == 201, await response.text()
    return proxy


@pytest.mark.parametrize("stream", [False, True])
async def test_session_holds_the_tokens_that_the_models_own_agent_would_have_sampled(
    proxy: RunningProxy, hosted: HostedModel, stream: bool
) -> None:
    session = await proxy.session(SessionKind.EVAL)
    hosted.says = [
        (
            {"content": None, "reasoning_content": "Let me look.", "tool_calls": [CALL]},
            "tool_calls",
        ),
        ({"content": "It holds a.txt."}, "stop"),
    ]
    sampling = {"temperature": 0.5, "presence_penalty": 0.25, "frequency_penalty": -0.5}
    asked = {"messages": ASKED, "tools": TOOLS, "max_tokens": 300, **sampling}
    if stream:
        events = b"".join(await proxy.events(session, CHAT, {**asked, "stream": True}))
        assert b"shell" in events
    else:
        _, reply = await proxy.post(session, CHAT, asked)
        called = reply["choices"][0]["message"]
        assert called["tool_calls"][0]["function"] == CALL["function"]
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "a.txt"}
        _, reply = await proxy.post(session, CHAT, {**asked, "messages": [*ASKED, called, result]})
        assert reply["choices"][0]["message"]["content"] == "It holds a.txt."

    assert hosted.keys[0] == "Bearer sk-hosted"
    first = hosted.bodies[0]
    assert (first["model"], first["tools"], first["messages"]) == ("teacher-1", TOOLS, ASKED)
    assert {name: first[name] for name in sampling} == sampling
    assert first["max_completion_tokens"] == 300
    assert "top_p" not in first  # neutral values are not sent
    _, turns = await proxy.record(session)
    again = rendered_turns(turns, proxy.rendering)
    for turn, own in zip(turns, again, strict=True):
        assert turn.sampled_ids.tolist() == own.sampled_ids.tolist()
        assert turn.prompt_ids.tolist() == own.prompt_ids.tolist()
        assert turn.parent == own.parent
        assert np.isnan(turn.logprobs).all()
    assert not are_tokens_of(turns, proxy.rendering)  # they were rendered, not sampled
    text = proxy.rendering.tokenizer.decode(turns[0].sampled_ids)
    assert text.startswith("<think>\nLet me look.\n</think>")
    if not stream:
        assert hosted.bodies[1]["messages"][2]["tool_calls"][0]["function"] == CALL["function"]
        assert turns[1].parent == 0


async def test_training_session_never_reaches_a_hosted_model(
    proxy: RunningProxy, hosted: HostedModel
) -> None:
    session = await proxy.session()
    status, reply = await proxy.post(session, CHAT, {"messages": ASKED})
    assert (status, "kind eval" in reply["error"]["message"]) == (400, True)
    assert hosted.bodies == []


async def test_truncated_answer_stays_truncated(proxy: RunningProxy, hosted: HostedModel) -> None:
    session = await proxy.session(SessionKind.EVAL)
    hosted.says = [({"content": "It holds"}, "length")]
    _, reply = await proxy.post(session, CHAT, {"messages": ASKED})
    assert reply["choices"][0]["finish_reason"] == "length"
    _, (turn,) = await proxy.record(session)
    assert turn.finish_reason is FinishReason.LENGTH
    assert turn.sampled_ids[-1] not in proxy.rendering.closes


@pytest.mark.parametrize(
    ("route", "body", "words", "calls"),
    [
        ("completions", {"prompt": "2 + 3 ="}, "takes messages only", 0),
        (
            CHAT,
            {"messages": ASKED, "tools": TOOLS, "tool_choice": "required"},
            "cannot continue",
            1,
        ),
        (
            CHAT,
            {"messages": [*ASKED, {"role": "assistant", "content": "It holds"}]},
            "cannot continue",
            0,
        ),
        (CHAT, {"messages": ASKED, "logprobs": True}, "logprobs", 0),
        (CHAT, {"messages": ASKED, "top_k": 5}, "top_k", 0),
        (CHAT, {"messages": ASKED, "stop": list("abcde")}, "accepts 4", 0),
    ],
)
async def test_request_that_the_route_cannot_express_is_refused(
    proxy: RunningProxy,
    hosted: HostedModel,
    route: str,
    body: dict[str, Any],
    words: str,
    calls: int,
) -> None:
    """A required call is refused after an answer without one, because the answer cannot be
    continued."""
    session = await proxy.session(SessionKind.EVAL)
    hosted.says = [({"content": "No."}, "stop")]
    status, reply = await proxy.post(session, route, body)
    assert (status, words in reply["error"]["message"]) == (400, True)
    assert len(hosted.bodies) == calls


async def test_answer_that_the_template_cannot_express_is_an_error_of_the_engine(
    proxy: RunningProxy, hosted: HostedModel
) -> None:
    session = await proxy.session(SessionKind.EVAL)
    hosted.says = [({"content": "The token <|im_end|> ends a turn."}, "stop")] * 3
    status, _ = await proxy.post(session, CHAT, {"messages": ASKED})
    assert status in (502, 503)
    _, turns = await proxy.record(session)
    assert all(turn.status == "cut" for turn in turns)
