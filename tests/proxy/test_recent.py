"""What is remembered of a session's calls changes nothing but their cost."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.conversation import conversation_keys
from proxy.errors import RequestError
from proxy.recent import Recent
from proxy.wire.chat import ChatDialect
from proxy.wire.dialect import Dialect
from proxy.wire.fields import MIN_BYTES, Fields, Request
from proxy.wire.messages import MessagesDialect
from proxy.wire.responses import ResponsesDialect

arguments = st.sampled_from([{"n": 1}, {"n": 1.0}, {"n": True}, {"n": "1"}, {}])
texts = st.sampled_from(["a", "b", ""])
tools = st.sampled_from([[], [1], [1.0], [True]]).map(
    lambda enum: [
        {"type": "function", "name": "f", "function": {"name": "f", "parameters": {"enum": enum}}}
    ]
)
chat = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}
) | arguments.map(
    lambda given: {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": given}}],
    }
)
claude = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]), "content": texts}
) | arguments.map(
    lambda given: {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": given}],
    }
)
codex = st.fixed_dictionaries(
    {"type": st.just("message"), "role": st.sampled_from(["user", "assistant"]), "content": texts}
)
CASES: list[tuple[Dialect, str, st.SearchStrategy[Any]]] = [
    (ChatDialect(), "messages", chat),
    (MessagesDialect(), "messages", claude),
    (ResponsesDialect(), "input", codex),
]


@pytest.mark.parametrize(("dialect", "name", "item"), CASES, ids=lambda case: str(case)[:20])
def test_calls_are_parsed_and_keyed_as_without_it(
    dialect: Dialect, name: str, item: st.SearchStrategy[Any]
) -> None:
    histories = st.lists(st.lists(item, min_size=1, max_size=5), min_size=1, max_size=8)

    @settings(max_examples=150, deadline=None)
    @given(histories, st.lists(tools, min_size=8, max_size=8), st.booleans())
    def check(histories: list[list[Any]], offered: list[Any], with_reasoning: bool) -> None:
        recent = Recent()
        grown: list[Any] = []
        for items, given_tools in zip(histories, offered, strict=False):
            grown = [*grown, *items] if len(items) < 5 else items
            body = {name: grown}
            if name == "messages" and dialect.name == "chat":
                body["tools"] = given_tools
            request = Request(body, recent, "s", MIN_BYTES)
            try:
                plain = dialect.parse(Fields(body), {})
            except RequestError as refusal:
                with pytest.raises(RequestError, match=re.escape(refusal.message)):
                    dialect.parse(request, {})
                continue
            call = dialect.parse(request, {})
            call.conversation.known = request.keys
            assert call.conversation.messages == plain.conversation.messages
            assert conversation_keys(
                call.conversation, with_reasoning=with_reasoning
            ) == conversation_keys(plain.conversation, with_reasoning=with_reasoning)

    check()


def test_only_what_is_new_is_parsed_and_memory_is_bounded() -> None:
    recent, parsed = Recent(limit_bytes=100), []

    def parse(index: int) -> int:
        parsed.append(index)
        return index

    for session, items in (("a", ["x"]), ("a", ["x", "y"]), ("b", ["x"]), ("a", ["x", "y", "z"])):
        assert recent.parsed(session, items, parse, parse, 40)[0] == list(range(len(items)))
    assert parsed == [0, 1, 0, 2]
    assert len(recent) == 80
    recent.parsed("c", ["x"], parse, parse, 40)  # forgets b, which was quiet longest
    recent.parsed("b", ["x"], parse, parse, 40)
    assert parsed == [0, 1, 0, 2, 0, 0]
    assert len(recent) == 80
