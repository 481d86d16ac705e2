"""Large requests are handled in threads, or refused before they are processed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from proxy.conversation.message_keys import KnownKeys
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import Tokenizer
from proxy.token_tree.tree import TokenTree
from proxy.wire.chat import ChatDialect

CONTEXT_TOKENS = 300
LONG = "The command printed a list of files. " * 25_000


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Step of a call → whether it ran in the event loop's thread."""
    seen: dict[str, bool] = {}

    def watch(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            seen[name] = threading.current_thread() is threading.main_thread()
            return original(*args, **named)

        monkeypatch.setattr(owner, name, watched)

    watch(ChatDialect, "parse")
    watch(TokenTree, "place")
    watch(KnownKeys, "keys")
    return seen


MESSAGES = [{"role": "user", "content": "Hi."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES * 3000},
        {"messages": MESSAGES, "tools": [TOOL] * 1000},
    ],
    ids=["messages", "tools"],
)
async def test_large_request_is_parsed_keyed_and_rendered_outside_the_event_loop(
    start_proxy: Any, threads: dict[str, bool], body: dict[str, Any]
) -> None:
    proxy = await start_proxy()
    session = await proxy.session()
    status, reply = await proxy.post(session, "chat/completions", body)
    assert status in (200, 400), reply
    assert not threads["parse"]
    assert not threads["keys"]
    assert not threads.get("place", False)


async def test_small_request_is_handled_in_the_event_loop(
    start_proxy: Any, threads: dict[str, bool]
) -> None:
    proxy = await start_proxy()
    session = await proxy.session()
    await proxy.post(session, "chat/completions", {"messages": MESSAGES})
    assert threads == {"parse": True, "place": True, "keys": True}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}),
        ("responses", {"input": LONG}),
        ("completions", {"prompt": LONG}),
    ],
)
async def test_text_that_cannot_fit_is_refused_without_being_tokenised(
    start_proxy: Any, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    encoded: list[int] = []
    original = Tokenizer._encode

    def encode(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        encoded.append(len(text))
        return original(self, text, add_special_tokens)

    proxy = await start_proxy(max_context_tokens=CONTEXT_TOKENS)
    session = await proxy.session()
    monkeypatch.setattr(Tokenizer, "_encode", encode)
    status, reply = await proxy.post(session, route, body)
    assert status == 400
    assert str(CONTEXT_TOKENS) in reply["error"]["message"]
    assert max(encoded, default=0) < 1000
    assert (await proxy.record(session))[1] == []


def test_lower_bound_never_exceeds_the_number_of_tokens(rendering: Rendering) -> None:
    tokenizer = rendering.tokenizer
    for text in ("", "a", LONG[:5000], " " * 5000, "-" * 3000, "e\u0301" * 500, "数学" * 400):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_tokens(LONG) > CONTEXT_TOKENS
