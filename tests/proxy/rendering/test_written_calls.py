"""What a model writes for a call is what the agent gets, and what comes back is the same call.

Each family's own template writes calls with drawn values; the sampled ids are read, whole and in
pieces, and written in each dialect. `CALLS_EXAMPLES=100000` draws more examples over all families.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from renderers.base import MODEL_RENDERER_MAP

from proxy.conversation import Conversation, Message, ToolCall
from proxy.errors import RequestError
from proxy.records import FinishReason, ForkCause
from proxy.rendering.answers import _added
from proxy.rendering.deltas import Delta
from proxy.rendering.families import FAMILIES as KNOWN
from proxy.rendering.prefix_stream import PrefixParser
from proxy.rendering.rendering import Rendering
from proxy.rendering.stream import AnswerParser
from proxy.rendering.tagged_calls import CallTags
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.whole import WholeParser
from proxy.wire.dialect import Outcome, Piece
from proxy.wire.fields import Fields
from proxy.wire.registry import open_dialects
from tests.proxy.rendering.test_control_text import controls
from tests.proxy.rendering.test_families import Family, family_of
from tests.proxy.rendering.test_stream import put_together, without_ids
from tests.proxy.rendering.written_calls import Drawn, clean_text, drawn_calls, text_with_tags
from tests.proxy.token_tree.test_tree import Recorder

__all__ = ["family_of"]
FAMILIES = [*sorted(set(MODEL_RENDERER_MAP.values())), "template"]
TAGGED = [name for name in FAMILIES if name in KNOWN and KNOWN[name].tags is not None]
ONE_CALL = ("gpt-oss", "llama-3")
"""Families that sample one call per answer."""
THOUGHTLESS = {
    *("deepseek-r1", "deepseek-v3", "deepseek-v4", "hy3", "kimi-k2", "laguna-m.1", "laguna-xs-2.1"),
    *("laguna-xs.2", "llama-3", "prime-qwen3", "qwen3-vl", "template"),
}
"""Families whose prompt closes the reasoning, or whose template does not write it with a call."""
SILENT = ("gemma4", "llama-3")
"""Families whose template writes no text before a call."""
OF_ITS_KIND = {
    *("deepseek-v3", "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "gpt-oss", "hy3", "inkling"),
    *("kimi-k2", "laguna-xs-2.1", "llama-3", "minimax-m2", "nemotron-3", "qwen3", "qwen3.5"),
    *("qwen3.6", "template"),
}
"""One family per format of calls; the others are read by the same code."""
EVERY = [
    pytest.param(name, marks=() if name in OF_ITS_KIND else pytest.mark.long) for name in FAMILIES
]
EXAMPLES = int(os.environ.get("CALLS_EXAMPLES", "0")) // len(FAMILIES) or 8
ASKED = Message("user", "Go.")
DIALECTS = open_dialects()


def check_settings(examples: int = EXAMPLES) -> Any:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, deadline=None, suppress_health_check=slow)


def asked(drawn: Drawn) -> Conversation:
    return Conversation([ASKED], [drawn.tool])


def answer_of(drawn: Drawn, text: str = "", reasoning: str = "") -> Message:
    calls = [
        ToolCall(f"functions.shell:{at}", "shell", json.dumps(arguments, ensure_ascii=False))
        for at, arguments in enumerate(drawn.calls)
    ]
    return Message("assistant", text, reasoning or None, calls)


def written(rendering: Rendering, conversation: Conversation, answer: Message) -> list[int]:
    """The ids that the family's template writes for an answer, up to the end-of-turn token."""
    before = rendering.full(conversation)
    results = [Message("tool", "Done.", tool_call_id=call.id) for call in answer.tool_calls]
    after = [*conversation.messages, answer, *results]
    added = _added(rendering, before, rendering.full(Conversation(after, conversation.tools)))
    ends = (at for at, token in enumerate(added) if token in rendering.closes)
    return added[: next(ends, len(added))]


def read_whole(rendering: Rendering, conversation: Conversation, ids: list[int]) -> Message:
    parser = WholeParser(rendering, rendering.full(conversation), conversation.tools)
    parser.feed(ids)
    return parser.finish()[1]


def read_in_pieces(
    rendering: Rendering, conversation: Conversation, ids: list[int], sizes: list[int]
) -> tuple[list[Delta], Message]:
    prompt, tools = rendering.full(conversation), conversation.tools
    parser: PrefixParser | AnswerParser = PrefixParser(rendering, prompt, tools)
    if rendering.markers is not None:
        parser = AnswerParser(rendering, prompt, tools, markers=rendering.markers)
    deltas: list[Delta] = []
    at = 0
    while at < len(ids):
        size = sizes[at % len(sizes)]
        deltas += parser.feed(ids[at : at + size])
        at += size
    rest, message = parser.finish()
    return deltas + rest, message


def values(arguments: str) -> Any:
    """The arguments by value; True, 1 and 1.0 are different."""
    return json.dumps(json.loads(arguments), sort_keys=True)


def same(calls: list[ToolCall], drawn: Drawn) -> bool:
    wanted = [json.dumps(arguments, sort_keys=True) for arguments in drawn.calls]
    return [(call.name, values(call.arguments)) for call in calls] == [
        ("shell", arguments) for arguments in wanted
    ]


def expected(drawn: Drawn, tags: CallTags | None) -> bool:
    """Whether no string of the calls is also another value that its schema allows."""
    words = tags is not None and tags.python_words
    return tags is None or not any(
        drawn.is_ambiguous(key, value, python_words=words)
        for arguments in drawn.calls
        for key, value in arguments.items()
    )


def rendered(rendering: Rendering, conversation: Conversation, answer: Message) -> list[int] | None:
    try:
        return written(rendering, conversation, answer)
    except RequestError:
        return None


@pytest.mark.parametrize("name", EVERY)
def test_call_that_is_written_is_the_call_that_is_read(name: str, family_of: Any) -> None:
    family: Family = family_of(name)
    rendering = family.rendering
    text, most = clean_text, 1 if name in ONE_CALL else 3

    @check_settings()
    @given(
        drawn_calls(text, most),
        st.sampled_from(["", "Let me look.", "é 😀\n\nThen."]),
        st.sampled_from(["", "I wonder.", "Is it <a>?\n\n- 1"]),
        st.lists(st.integers(1, 9), min_size=1, max_size=7),
    )
    def check(drawn: Drawn, said: str, thought: str, sizes: list[int]) -> None:
        assume(expected(drawn, rendering.family.tags))
        thought = "" if name in THOUGHTLESS else thought
        said = "" if name in SILENT else said
        answer = answer_of(drawn, said, thought)
        ids = rendered(rendering, asked(drawn), answer)
        assume(ids is not None)
        assert ids is not None
        message = read_whole(rendering, asked(drawn), ids)
        assert same(message.tool_calls, drawn)
        assert message.text == said
        assert message.reasoning == (thought or None)
        for split in (sizes, [1]):
            deltas, streamed = read_in_pieces(rendering, asked(drawn), ids, split)
            assert without_ids(streamed.tool_calls) == without_ids(message.tool_calls)
            together = put_together(deltas)
            assert together[0] == message.text == streamed.text
            assert without_ids(together[2]) == without_ids(message.tool_calls)
            in_all_dialects(drawn, deltas, streamed)

    check()


def in_all_dialects(drawn: Drawn, deltas: list[Delta], message: Message) -> None:
    outcome = Outcome(message, FinishReason.TOOL_CALLS, 1, 0, 1)
    for dialect, body in (
        ("chat/completions", {"messages": [{"role": "user", "content": "Go."}]}),
        ("messages", {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 9}),
        ("responses", {"input": "Go."}),
    ):
        kind = DIALECTS[dialect]
        for stream in (False, True):
            call = kind.parse(Fields({**body, "model": "m", "stream": stream}), {})
            call.extra.setdefault("id", "resp_0_a")
            if stream:
                writer = kind.writer(call, "a")
                pieces = [writer.piece(Piece(0, (delta,))) for delta in deltas]
                data = b"".join([writer.start(1, 0), *pieces, writer.end([outcome])])
                got = _STREAMED[dialect](_events(data))
            else:
                got = _WHOLE[dialect](json.loads(kind.whole(call, "a", [outcome])))
            assert got == drawn.calls, (dialect, stream)


def _events(data: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _chat_pieces(events: list[dict[str, Any]]) -> list[Any]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls", []):
                index = call["index"]
                texts[index] = texts.get(index, "") + call["function"].get("arguments", "")
    return [json.loads(text) for text in texts.values()]


def _messages_pieces(events: list[dict[str, Any]]) -> list[Any]:
    texts: dict[int, str] = {}
    for event in events:
        if event.get("content_block", {}).get("type") == "tool_use":
            texts[event["index"]] = ""
        if event.get("delta", {}).get("type") == "input_json_delta":
            texts[event["index"]] += event["delta"]["partial_json"]
    return [json.loads(text) for text in texts.values()]


def _responses_pieces(events: list[dict[str, Any]]) -> list[Any]:
    sent: dict[str, str] = {}
    for event in events:
        if event["type"] == "response.function_call_arguments.delta":
            sent[event["item_id"]] = sent.get(event["item_id"], "") + event["delta"]
    assert list(sent.values()) == [
        event["arguments"]
        for event in events
        if event["type"] == "response.function_call_arguments.done"
    ]
    return [json.loads(text) for text in sent.values()]


_STREAMED: dict[str, Any] = {
    "chat/completions": _chat_pieces,
    "messages": _messages_pieces,
    "responses": _responses_pieces,
}
_WHOLE: dict[str, Any] = {
    "chat/completions": lambda body: [
        json.loads(call["function"]["arguments"])
        for call in body["choices"][0]["message"]["tool_calls"]
    ],
    "messages": lambda body: [
        block["input"] for block in body["content"] if block["type"] == "tool_use"
    ],
    "responses": lambda body: [
        json.loads(item["arguments"]) for item in body["output"] if item["type"] == "function_call"
    ],
}


@pytest.mark.parametrize("name", EVERY)
def test_value_with_a_familys_own_tags_is_whole_or_visibly_broken(
    name: str, family_of: Any
) -> None:
    """The call is read as written; or its arguments are no JSON, or it is text; or the template
    writes the call that is read in the same way, so that nobody can tell them apart."""
    family: Family = family_of(name)
    rendering = family.rendering
    text = text_with_tags(Quoted(rendering.family.tags).parts() if rendering.family.tags else ())

    @check_settings()
    @given(drawn_calls(text, 1 if name in ONE_CALL else 2))
    def check(drawn: Drawn) -> None:
        assume(expected(drawn, rendering.family.tags))
        ids = rendered(rendering, asked(drawn), answer_of(drawn))
        assume(ids is not None)
        assert ids is not None
        message = read_whole(rendering, asked(drawn), ids)
        deltas, streamed = read_in_pieces(rendering, asked(drawn), ids, [1, 5, 2])
        assert without_ids(streamed.tool_calls) == without_ids(message.tool_calls)
        assert without_ids(put_together(deltas)[2]) == without_ids(message.tool_calls)
        calls = message.tool_calls
        if any(_is_broken(call) for call in calls) or message.text or same(calls, drawn):
            return
        if "<think>" in str(drawn.calls) or "</think>" in str(drawn.calls):
            return
        assert any(
            rendered(rendering, asked(drawn), Message("assistant", tool_calls=other)) == ids
            for other in spellings(calls)
        )

    check()


def test_json_that_ended_before_a_literal_tag_is_visibly_broken(family_of: Any) -> None:
    """DeepSeek V4 says that a value is JSON; then a text which is none is not a string instead."""
    rendering = family_of("deepseek-v4").rendering
    tags = rendering.family.tags
    opens, closes = f'{tags.nests}"a" string="true">', f"{tags.closes}\n{tags.ends[0]}"
    drawn = Drawn(
        {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}},
        [{"a": {"a": {"a": opens}}, "c": closes}],
    )
    ids = rendered(rendering, asked(drawn), answer_of(drawn))
    assert ids is not None
    message = read_whole(rendering, asked(drawn), ids)
    (call,) = message.tool_calls
    assert _is_broken(call) or same([call], drawn)
    _, streamed = read_in_pieces(rendering, asked(drawn), ids, [1])
    assert streamed.tool_calls[0].arguments == call.arguments


STRINGS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs.",
        "parameters": {
            "type": "object",
            "additionalProperties": {"type": ["string", "null"]},
        },
    },
}


class Quoted:
    """Parts of the text of calls, as a family's template writes them, for a value."""

    def __init__(self, tags: CallTags) -> None:
        line = "\n" if tags.on_lines else ""
        gap = tags.between if tags.value[0].startswith("<") else ""
        self.between = tags.between
        self.end = line + tags.closes + tags.between + tags.between.join(tags.ends)
        self.call = tags.call
        self.header = tags.call + tags.opening.format("f")
        self.argument = f"{tags.key[0]}a{tags.key[1]}{gap}{tags.value[0]}{line}"
        self.begun = f"{self.header}{tags.between}{self.argument}1"
        self.whole = self.begun + self.end

    def parts(self) -> tuple[str, ...]:
        return (self.call, self.header, self.argument, self.begun, self.end, self.whole)

    def longer(self) -> Iterator[str]:
        """Values that close more calls than they open."""
        for space in ("", " ", "\n", "\n\n", " \n", "\t", "\r\n", "Now.", "\nNow.\n"):
            if space == self.between:
                continue
            two = self.end + space + self.whole
            yield from (two, two + two, two * 3, f"x{two}\ny", self.begun + two)
        yield f"{self.end} {self.call}"
        yield f"{self.end}\n\n{self.argument}{self.whole}{self.argument}{self.end}"
        yield f"{self.end} {self.begun}{self.whole}{self.end}{self.end}"

    def open(self) -> Iterator[str]:
        """Values whose last call the template's own end closes, after white space that is not the
        template's."""
        for space in ("", " ", "\n", "\n\n", "\t", "\r\n"):
            if space == self.between:
                continue
            two = self.end + space + self.begun
            yield from (two, f"x{two}", two * 2, f"{self.end} {self.whole}{space}{self.begun}")


@pytest.mark.parametrize("name", EVERY)
def test_value_with_a_control_token_is_whole_or_visibly_broken(name: str, family_of: Any) -> None:
    """Each control token of the family, as the token and as text, alone and around what looks like
    the JSON of a call: the one call has the value as it was written, or its arguments are no JSON;
    never a cut value, and never another call."""
    rendering = family_of(name).rendering
    assert rendering.tokenizer.control is not None
    whole = {"token": 0, "text": 0}
    marks = controls(rendering)
    for mark, form in product(marks, whole):
        for value in (f"x{mark}y", f'{mark}{{"name": "shell", "arguments": {{"b": "q"}}}}{mark}'):
            drawn = Drawn(STRINGS, [{"b": value, "c": "x"}])
            said = rendering.tokenizer.control.muted(value)[0] if form == "text" else value
            answer = answer_of(Drawn(STRINGS, [{"b": said, "c": "x"}]))
            ids = written(rendering, asked(drawn), answer)
            message = read_whole(rendering, asked(drawn), ids)
            deltas, streamed = read_in_pieces(rendering, asked(drawn), ids, [1, 5, 2])
            assert without_ids(streamed.tool_calls) == without_ids(message.tool_calls)
            assert without_ids(put_together(deltas)[2]) == without_ids(message.tool_calls)
            (call,) = message.tool_calls
            if not _is_broken(call):
                assert same([call], drawn), (mark, form, value)
                whole[form] += 1
    assert whole["text"] >= whole["token"] > len(marks) // 2


def every_split(rendering: Rendering, drawn: Drawn, ids: list[int]) -> Message:
    """The answer, the same in any two pieces and token by token."""
    message = read_whole(rendering, asked(drawn), ids)
    for sizes in ([1], [2], *([at, len(ids)] for at in range(1, len(ids)))):
        deltas, streamed = read_in_pieces(rendering, asked(drawn), ids, sizes)
        assert without_ids(streamed.tool_calls) == without_ids(message.tool_calls)
        assert without_ids(put_together(deltas)[2]) == without_ids(message.tool_calls)
        assert put_together(deltas)[0] == message.text == streamed.text
    return message


@pytest.mark.parametrize("name", [name for name in TAGGED if name in OF_ITS_KIND])
def test_calls_in_a_value_are_not_read_as_calls(name: str, family_of: Any) -> None:
    """They follow otherwise than the template writes calls, so the value is whole; where the two
    cannot be told apart, the arguments are no JSON and nothing of the value is called."""
    family: Family = family_of(name)
    rendering, tags = family.rendering, family.rendering.family.tags
    assert tags is not None
    quoted = Quoted(tags)
    for value in quoted.longer():
        for calls in ([{"b": value}], [{"b": value, "c": "x"}], [{"b": value}] * 2):
            drawn = Drawn(STRINGS, calls)
            ids = written(rendering, asked(drawn), answer_of(drawn))
            assert same(read_whole(rendering, asked(drawn), ids).tool_calls, drawn), value
    for value in quoted.open():
        drawn = Drawn(STRINGS, [{"b": value}])
        ids = written(rendering, asked(drawn), answer_of(drawn))
        message = read_whole(rendering, asked(drawn), ids)
        (call,) = message.tool_calls
        assert _is_broken(call)
        assert call.name == "shell"
        assert not message.text


@pytest.mark.parametrize("name", [name for name in TAGGED if name in OF_ITS_KIND])
def test_calls_in_a_value_are_streamed_as_they_are_read(name: str, family_of: Any) -> None:
    family: Family = family_of(name)
    rendering, tags = family.rendering, family.rendering.family.tags
    assert tags is not None
    quoted = Quoted(tags)
    for value in (*islice(quoted.longer(), 2), *islice(quoted.open(), 1)):
        drawn = Drawn(STRINGS, [{"b": value}])
        every_split(rendering, drawn, written(rendering, asked(drawn), answer_of(drawn)))


@pytest.mark.parametrize("name", [name for name in TAGGED if name in OF_ITS_KIND])
def test_calls_in_a_value_that_the_template_writes_so_are_calls(name: str, family_of: Any) -> None:
    """Nobody can tell these apart: the ids are the same."""
    family: Family = family_of(name)
    rendering, tags = family.rendering, family.rendering.family.tags
    assert tags is not None
    quoted = Quoted(tags)
    one = Drawn(STRINGS, [{"b": f"{quoted.end}{quoted.between}{quoted.begun}y"}])
    ids = written(rendering, asked(one), answer_of(one))
    calls = [ToolCall("", "shell", '{"b": ""}'), ToolCall("", "f", '{"a": "1y"}')]
    two = Message("assistant", tool_calls=calls)
    assert rendered(rendering, asked(one), two) == ids
    read = every_split(rendering, one, ids).tool_calls
    assert [(call.name, values(call.arguments)) for call in read] == [
        (call.name, call.arguments) for call in calls
    ]


@pytest.mark.parametrize("name", [name for name in TAGGED if name in OF_ITS_KIND])
def test_text_between_calls_is_read(name: str, family_of: Any) -> None:
    family: Family = family_of(name)
    rendering, tags = family.rendering, family.rendering.family.tags
    assert tags is not None
    drawn = Drawn(STRINGS, [{"b": "x"}, {"c": "\n1"}])
    ids = written(rendering, asked(drawn), answer_of(drawn))
    text = rendering.tokenizer.decode(ids)
    first, _, rest = text.rpartition(tags.call)
    for said in ("Now.", "\nNow.\n", "\n\nNow 数学 <b>.\n\n"):
        ids = rendering.tokenizer.encode(first + said + tags.call + rest)
        message = every_split(rendering, drawn, ids)
        assert same(message.tool_calls, drawn)
        assert message.text.strip() == said.strip()


def spellings(calls: list[ToolCall]) -> Iterator[list[ToolCall]]:
    """The calls, with each argument that is not a string also as the string of its JSON: `true` for
    an argument without a type is what the template writes for the string."""
    keys, choices = [], list[tuple[Any, ...]]()
    for index, call in enumerate(calls):
        for key, value, text in _parts(call.arguments):
            keys.append((index, key))
            choices.append((value,) if isinstance(value, str) else (value, text))
    for chosen in product(*choices):
        arguments: list[dict[str, Any]] = [{} for _ in calls]
        for (index, key), value in zip(keys, chosen, strict=True):
            arguments[index][key] = value
        yield [
            ToolCall(call.id, call.name, json.dumps(each, ensure_ascii=False))
            for call, each in zip(calls, arguments, strict=True)
        ]


def _parts(arguments: str) -> Iterator[tuple[str, Any, str]]:
    """Each member of an object: its key, its value, and the JSON of the value."""
    decoder, at = json.JSONDecoder(), 1
    while arguments[at : at + 1] == '"':
        key, at = decoder.raw_decode(arguments, at)
        begins = at + 1
        value, at = decoder.raw_decode(arguments, begins)
        yield key, value, arguments[begins:at]
        at += 1


def _is_broken(call: ToolCall) -> bool:
    try:
        return not isinstance(json.loads(call.arguments), dict)
    except ValueError:
        return True


AWKWARD = {
    "a": "  def f(x):\n        return x\n\n",
    "b": "123",
    "n": True,
    "m": None,
    "o": {"x": [1, " y\n", False], "é": None},
}
AWKWARD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "n": {"type": "boolean"},
                "m": {"type": ["integer", "null"]},
                "o": {"type": "object"},
            },
        },
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_call_that_comes_back_extends_the_path(name: str, family_of: Any) -> None:
    """As the agent got it, or written again by its client. A fork is allowed only to a renderer
    that cannot show what follows an answer, and then for any call."""
    rendering = family_of(name).rendering
    causes = []
    for arguments in ({"a": "ls"}, AWKWARD):
        drawn = Drawn(AWKWARD_TOOL, [arguments])
        ids = written(rendering, asked(drawn), answer_of(drawn))
        recorder = Recorder(rendering)
        text = rendering.tokenizer.decode(ids)
        assert rendering.tokenizer.encode(text) == ids
        turn, message = recorder.ask(asked(drawn), text, close=False)
        assert turn.fork_cause is None
        assert same(message.tool_calls, drawn)
        for call in message.tool_calls:
            call.arguments = json.dumps(json.loads(call.arguments), indent=1)
        after = [ASKED, message, Message("tool", "Done.", tool_call_id=message.tool_calls[0].id)]
        placement = recorder.place(Conversation(after, [AWKWARD_TOOL]))
        causes.append(placement.cause)
        if placement.cause is None:
            assert placement.shared_tokens >= turn.path_tokens
    assert causes[0] == causes[1]
    assert causes[0] in (None, ForkCause.UNPROVABLE_BRIDGE)


@pytest.mark.parametrize("name", ["deepseek-v4", "glm-5", "minimax-m2", "qwen3", "qwen3.5"])
def test_long_call_is_streamed_in_linear_time(
    name: str, family_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of tokens that are decoded, for two lengths."""
    rendering = family_of(name).rendering
    decoded = 0
    own = Tokenizer.decode

    def counted(self: Tokenizer, ids: Any, *args: Any, **kwargs: Any) -> str:
        nonlocal decoded
        decoded += 1 if isinstance(ids, int) else len(ids)
        return own(self, ids, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    counts, lengths = [], []
    for chars in (10_000, 40_000):
        drawn = Drawn(AWKWARD_TOOL, [{"a": "x = 1\n" * (chars // 6)}])
        ids = written(rendering, asked(drawn), answer_of(drawn))
        decoded = 0
        deltas, message = read_in_pieces(rendering, asked(drawn), ids, [16])
        assert same(message.tool_calls, drawn)
        assert len(deltas) > 20
        counts.append(decoded)
        lengths.append(len(ids))
    assert counts[1] / counts[0] < 1.5 * lengths[1] / lengths[0]


LONG_CHARS = 200_000
LONG = [  # one family of JSON and one of tags; all take minutes
    pytest.param(name, marks=() if name in ("qwen3", "qwen3.5") else pytest.mark.long)
    for name in FAMILIES
]


@pytest.mark.parametrize("name", LONG)
def test_long_value_is_the_value_that_is_read(name: str, family_of: Any) -> None:
    rendering = family_of(name).rendering

    @check_settings(2)
    @given(clean_text, clean_text.filter(bool), clean_text)
    def check(first: str, part: str, last: str) -> None:
        value = first + part * (LONG_CHARS // len(part)) + last
        drawn = Drawn(AWKWARD_TOOL, [{"a": value}])
        ids = rendered(rendering, asked(drawn), answer_of(drawn))
        assume(ids is not None)
        assert ids is not None
        assert same(read_whole(rendering, asked(drawn), ids).tool_calls, drawn)
        deltas, message = read_in_pieces(rendering, asked(drawn), ids, [64])
        assert same(message.tool_calls, drawn)
        assert without_ids(put_together(deltas)[2]) == without_ids(message.tool_calls)

    check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "shell", "arguments": {"a": "x</tool_call>y"}}', ['{"a": "x</tool_call>y"}']),
        (
            '{"name": "shell", "arguments": {"a": "<tool_call>\\n{}\\n</tool_call>", "b": "1"}}',
            ['{"a": "<tool_call>\\n{}\\n</tool_call>", "b": "1"}'],
        ),
        # Never closed: the block ends at its first tag, and the arguments are no JSON.
        ('{"name": "shell", "arguments": {"a": "x</tool_call>y}}', ['{"a": "x']),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-vl", "template"])
def test_closing_tag_in_a_string_of_json_does_not_end_the_call(
    name: str, text: str, arguments: list[str], stream: bool, family_of: Any
) -> None:
    rendering, drawn = family_of(name).rendering, Drawn(AWKWARD_TOOL, [])
    ids = rendering.tokenizer.encode(f"Look.\n<tool_call>\n{text}\n</tool_call>")
    if stream:
        deltas, message = read_in_pieces(rendering, asked(drawn), ids, [1])
        assert [call.arguments for call in put_together(deltas)[2]] == arguments
    else:
        message = read_whole(rendering, asked(drawn), ids)
    assert [call.arguments for call in message.tool_calls] == arguments
    assert message.text.startswith("Look.")


@pytest.mark.parametrize("name", TAGGED)
def test_arguments_of_a_truncated_call_are_no_json(name: str, family_of: Any) -> None:
    """Cut after each token, so also within a character and within a tag."""
    rendering, drawn = (
        family_of(name).rendering,
        Drawn(AWKWARD_TOOL, [{"a": "été 数学 😀", "b": "1"}]),
    )
    ids = written(rendering, asked(drawn), answer_of(drawn))
    (whole,) = read_whole(rendering, asked(drawn), ids).tool_calls
    broken = 0
    for end in range(len(ids)):
        for call in read_whole(rendering, asked(drawn), ids[:end]).tool_calls:
            assert call.arguments == whole.arguments or _is_broken(call)
            broken += _is_broken(call)
    assert broken > 5
