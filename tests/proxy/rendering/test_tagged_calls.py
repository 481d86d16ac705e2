"""Calls with one tag per argument, as text: in every split, malformed, and long."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.conversation import ToolCall
from proxy.rendering import tagged_calls as module
from proxy.rendering.argument_types import argument_type
from proxy.rendering.families import FAMILIES, GLM_TAGS, QWEN_TAGS
from proxy.rendering.tagged_calls import CallTags, tagged_calls
from tests.proxy.rendering.written_calls import TAGS, WORDS

FORMATS = {name: family.tags for name, family in FAMILIES.items() if family.tags is not None}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "string"},
                "b": {"type": ["string", "null"]},
                "n": {"type": "integer"},
            },
        },
    },
}


def test_package_that_is_corrected_is_of_the_version_that_was_looked_at() -> None:
    """Its parsers strip and convert arguments, and end a block of JSON at a tag in a string. Look
    at a new version: what it reads as written needs no correction, and new families need `tags`."""
    assert version("renderers") == "0.1.12"


def call(*pairs: tuple[str, str], end: bool = True) -> str:
    """A call of `f` as Qwen3.5's template writes it."""
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function=f>\n{written}" + "</function>\n</tool_call>" * end


def read(text: str, tags: CallTags = QWEN_TAGS, *, unfinished: bool = False) -> list[Any]:
    return [
        item.arguments if isinstance(item, ToolCall) else [item]
        for item in tagged_calls(tags, text, [TOOL], unfinished=unfinished)
    ]


@pytest.mark.parametrize(
    "tags", {tags.call + tags.key[0]: tags for tags in FORMATS.values()}.values()
)
def test_calls_only_grow_while_the_text_grows(tags: CallTags) -> None:
    """Also if it is no call: nothing that was sent can be taken back."""
    name = {"<invoke": ' name="f">', "<tool_call>": "\n<function=f>"}.get(tags.call, "f")
    pieces = [
        *(tags.call, tags.call + name, tags.closes, *tags.ends, *tags.around),
        *(f"{tags.key[0]}{key}{tags.key[1]}{value}" for key in "abn" for value in tags.value),
        *("\n", " ", "x", "12", "true", "é", "<", "</", "f", *WORDS[:12], *TAGS[:8]),
        tags.closes + tags.between + tags.between.join(tags.ends),
    ]
    whole = f"{tags.closes}{tags.between}{tags.key[0]}a{tags.key[1]}{tags.value[0]}x"
    pieces += [whole] * 3
    line = "\n" if tags.on_lines else ""
    end = line + tags.closes + tags.between + tags.between.join(tags.ends)
    opening = tags.call + tags.opening.format("f") + tags.between
    pieces += [end, end, end + tags.between, opening, f"{end} {opening}", end + "x" + opening]
    pieces += [f"{tags.between}{tags.key[0]}b{tags.key[1]}{tags.value[0]}{line}"] * 3

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.sampled_from(pieces), max_size=14).map("".join))
    def check(text: str) -> None:
        text = tags.call + name + text
        sent: list[ToolCall] = []
        for end in range(len(text) + 1):
            items = tagged_calls(tags, text[:end], [TOOL], unfinished=True)
            calls = [item for item in items if isinstance(item, ToolCall)]
            final = tagged_calls(tags, text[:end], [TOOL], unfinished=False)
            finished = [item for item in final if isinstance(item, ToolCall)]
            for known in (calls, finished):
                assert len(known) >= len(sent)
                for before, after in zip(sent, known, strict=False):
                    assert after.name == before.name
                    assert after.arguments.startswith(before.arguments)
            sent = calls

    check()


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (call(("a", "  x\n")), ['{"a":"  x\\n"}']),
        (call(("a", "")), ['{"a":""}']),
        (call(("a", "123"), ("b", "1e5"), ("n", "5")), ['{"a":"123","b":"1e5","n":5}']),
        (call(("b", "None"), ("n", "None")), ['{"b":null,"n":null}']),
        (call(("n", "True")), ['{"n":true}']),
        (call(("n", "five")), ['{"n":"five"}']),
        (call(), ["{}"]),
        (call(("a", "1")) + "\n" + call(("a", "2")), ['{"a":"1"}', '{"a":"2"}']),
        (call(("a", "1")) + "\nNow.\n" + call(("n", "2")), ['{"a":"1"}', ["Now."], '{"n":2}']),
        (call(("a", "1")) + "\nDone.", ['{"a":"1"}', ["Done."]]),
        (call(("a", "x</parameter>y")), ['{"a":"x</parameter>y"}']),
        (call(("a", "x\n</parameter>\ny")), ['{"a":"x\\n</parameter>\\ny"}']),
        (call(("a", "<parameter=z>")), ['{"a":"<parameter=z>"}']),
        (call(("a", "</tool_call>"), ("n", "1")), ['{"a":"</tool_call>","n":1}']),
        (call(("a", "<tool_call>")) + "\n" + call(("n", "1")), ['{"a":"<tool_call>"}', '{"n":1}']),
        (call(("a", "<|im_start|>é😀")), ['{"a":"<|im_start|>é😀"}']),
        # Not as the template writes it
        ("<tool_call><function=f><parameter=a>x</parameter></function></tool_call>", ['{"a":"x"}']),
        (call(("a", "x"), end=False) + "\n\n</function>  </tool_call>", ['{"a":"x"}']),
        (
            "<tool_call><function=f><parameter=a>x</parameter><parameter=n>1</parameter>"
            "</function></tool_call>",
            ['{"a":"x","n":1}'],
        ),
        # An unknown argument, and an unknown tool
        (call(("z", '{"a": 1}')), ['{"z":{"a": 1}}']),
        (call(("z", " 1")), ['{"z":" 1"}']),
        (call(("z", "1")).replace("=f>", "=g>"), ['{"z":1}']),
        # Numbers that no double holds, and JSON as it is written
        (call(("n", "123456789012345678901")), ['{"n":123456789012345678901}']),
        (call(("z", '{ "b":1,"a":2.0 }')), ['{"z":{ "b":1,"a":2.0 }}']),
        # Malformed
        ("<tool_call>\nf\n</tool_call>", [["<tool_call>\nf\n</tool_call>"]]),
        (
            "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>",
            [["<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>"]],
        ),
        # Truncated
        ("<tool_call>\n<function=f>\n<param", [["<tool_call>\n<function=f>\n<param"]]),
        (call(("a", "x"), end=False)[:-14], ['{"a":"x']),
        (call(("a", "x"), ("n", "1"), end=False), ['{"a":"x","n":1']),
        (call(("a", "x"), end=False) + "<parameter=n>\n12", ['{"a":"x"']),
    ],
)
def test_call_is_read_as_it_was_written(text: str, arguments: list[Any]) -> None:
    assert read(text) == arguments


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_examples_of_the_format_are_part_of_a_value(name: str) -> None:
    """An agent that edits a parser of the model's own calls."""
    tags = FORMATS[name]
    gap = tags.between

    def opening(key: str) -> str:
        space = gap if tags.value[0].startswith("<") else ""
        line = "\n" if tags.on_lines else ""
        return f"{tags.key[0]}{key}{tags.key[1]}{space}{tags.value[0]}{line}"

    names = {"<invoke": f'{tags.call} name="f">', "<tool_call>": f"{tags.call}f"}
    header = names.get(tags.call, f"{tags.call}f" if tags.around else tags.call)
    if tags.on_lines:
        header = "<tool_call>\n<function=f>"
    elif tags.in_each_call:
        header = f'{tags.call} name="f">'
    closes = ("\n" if tags.on_lines else "") + tags.closes + gap
    end = closes + gap.join(tags.ends)
    example = header + gap + opening("x") + "1" + closes + opening("y") + "2" + end
    value = f"Write:\n{example}\n{example}\nThen stop."
    written = header + gap + opening("a") + value + end
    assert [json.loads(each) for each in read(written, tags)] == [{"a": value}]
    twice = written + tags.between + written
    assert [json.loads(each) for each in read(twice, tags)] == [{"a": value}] * 2
    first, said, second = read(f"{written}\nNow.\n{written}", tags)
    assert [json.loads(first), said, json.loads(second)] == [{"a": value}, ["Now."], {"a": value}]


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        (call(("a", "x"), ("a", "y")), QWEN_TAGS),
        (
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value><arg_key>n</arg_key>"
            "<arg_value>1</arg_value>\n</tool_call>",
            GLM_TAGS,
        ),
    ],
)
def test_value_that_may_be_cut_makes_the_arguments_no_json(text: str, tags: CallTags) -> None:
    (arguments,) = read(text, tags)
    assert arguments.startswith('{"a":"x"')
    assert tags.closes in arguments
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(arguments)


@pytest.mark.parametrize("key", ["a>b", "a b", "été", "a\nb", "x" * 600, " a"])
def test_declared_name_of_any_form_is_read(key: str) -> None:
    function = {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    text = call((key, "1"))
    (found,) = tagged_calls(QWEN_TAGS, text, tools, unfinished=False)
    assert isinstance(found, ToolCall)
    assert json.loads(found.arguments) == {key: "1"}
    for end in range(len(text)):
        begun = tagged_calls(QWEN_TAGS, text[:end], tools, unfinished=True)
        assert all(
            isinstance(each, ToolCall) and found.arguments.startswith(each.arguments)
            for each in begun
        )


def test_reading_looks_at_each_tag_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where no rule finds an end: openings that nothing closes, ends within values."""
    looked = 0
    own = module._Reader._argument

    def counted(self: Any, at: int) -> Any:
        nonlocal looked
        looked += 1
        return own(self, at)

    monkeypatch.setattr(module._Reader, "_argument", counted)
    for value in (
        "<parameter=z>",
        "x</parameter>\n<parameter=y>",
        "\n</parameter>\n</function>\n</tool_call>",
    ):
        counts = []
        for size in (100, 400):
            looked = 0
            read("\n".join(call(("a", value * 3), ("n", "1")) for _ in range(size)))
            counts.append(looked)
        assert counts[1] < 5 * counts[0]


@pytest.mark.parametrize(
    ("schema", "text", "written"),
    [
        ({"type": "string"}, "true", '"true"'),
        ({"type": ["string", "null"]}, "123", '"123"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": ["auto", 1]}, "1", "1"),
        ({"enum": ["auto", 1]}, "2", '"2"'),
        ({"const": "5"}, "5", '"5"'),
        ({"$ref": "#/$defs/text"}, "5", '"5"'),
        ({"$ref": "#/$defs/list"}, "[1]", '"[1]"'),
        ({"$ref": "#/$defs/list"}, '["1"]', '["1"]'),
        ({"$ref": "#/$defs/self"}, "5", "5"),
        ({"$ref": "#/nowhere"}, "5", "5"),
        ({"allOf": [{"$ref": "#/$defs/text"}, {"maxLength": 3}]}, "5", '"5"'),
        ({"type": "boolean"}, " true\n", "true"),
        ({"type": "boolean"}, "True", "true"),
        ({"type": ["boolean", "string"]}, "True", '"True"'),
        ({"type": "array"}, "a, b", '"a, b"'),
        ({"type": "object"}, '{"a": "\n"}', '"{\\"a\\": \\"\\n\\"}"'),
        (
            {"type": ["string", "object"], "properties": {"a": {"type": "integer"}}},
            '{"a": 1}',
            '{"a": 1}',
        ),
        ({"type": "STRING"}, "5", '"5"'),
        ({}, "5", "5"),
        ({}, "x", '"x"'),
        ({}, '"x"', '"\\"x\\""'),
        (True, "5", "5"),
    ],
)
def test_schema_decides_what_a_text_is(schema: Any, text: str, written: str) -> None:
    parameters = {
        "properties": {"a": schema},
        "$defs": {
            "text": {"type": "string"},
            "list": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            "self": {"$ref": "#/$defs/self"},
        },
    }
    assert argument_type(parameters, "a").to_json(text, python_words=False) == written
    assert re.fullmatch(r'[\[{"].*|true|null|\d+', written)
