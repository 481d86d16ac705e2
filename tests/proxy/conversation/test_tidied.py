"""What a client may change in a call, and what makes it another call."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation.messages import ToolCall
from proxy.conversation.tidied import tidied
from proxy.settings.profiles import Profiles

PROFILE = Profiles({}).get("default")
EDIT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "old": {"type": "string"},
        "new": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "backup": {"type": "boolean", "default": True},
        "line": {"type": "integer"},
        "ratio": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "list_or_text": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "note": {"type": ["string", "null"]},
        "nothing": {"type": ["string", "null"], "default": None},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}},
        "what": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    },
    "required": ["path"],
    "additionalProperties": False,
    "$defs": {
        "Edit": {
            "type": "object",
            "properties": {"at": {"type": "integer", "default": 1}, "text": {"type": "string"}},
        },
        "A": {"properties": {"kind": {"const": "a"}, "size": {"type": "integer", "default": 3}}},
        "B": {"properties": {"kind": {"const": "b"}, "size": {"type": "integer", "default": 4}}},
    },
}


def compared(sent: Any, kept: Any, schema: Any = EDIT, **names: str) -> tuple[str, ...] | None:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    made = {"sent_id": "c", "sent_name": "edit", "name": "edit", **names}
    return tidied(
        ToolCall(made["sent_id"], made["sent_name"], text(sent)),
        ToolCall("c", made["name"], text(kept)),
        schema,
        rewrites=PROFILE.rewrites,
        stand_ins=PROFILE.stand_ins,
    )


P = {"path": "a"}


@pytest.mark.parametrize(
    ("sent", "kept", "changes"),
    [
        ({**P, "all": False}, P, ["all: default added"]),
        (P, {**P, "all": False}, ["all: default dropped"]),
        ({**P, "line": 2}, {**P, "line": "2"}, ["line: text became a number"]),
        ({**P, "line": 2}, {**P, "line": " 2 "}, ["line: text became a number"]),
        ({**P, "ratio": 5000}, {**P, "ratio": "5e3"}, ["ratio: text became a number"]),
        ({**P, "new": "7"}, {**P, "new": 7}, ["new: a number became text"]),
        ({**P, "new": '{"a":1}'}, {**P, "new": {"a": 1}}, ["new: an object became text"]),
        ({**P, "all": True}, {**P, "all": "True"}, ["all: text became a boolean"]),
        ({**P, "tags": ["x"]}, {**P, "tags": '["x"]'}, ["tags: text became a list"]),
        ({**P, "list_or_text": [1]}, {**P, "list_or_text": "[1]"},
         ["list_or_text: text became a list"]),
        ({**P, "note": None}, P, ["note: null added"]),
        (P, {**P, "note": None}, ["note: null dropped"]),
        ({**P, "nothing": None}, P, ["nothing: default added"]),
        ({**P, "new": "a\r\n\tb"}, {**P, "new": "a \r\n\tb\u00a0"}, ["new: blanks trimmed"]),
        ({**P, "edits": [{"at": 1, "text": "x"}]}, {**P, "edits": [{"text": "x "}]},
         ["edits[0].at: default added", "edits[0].text: blanks trimmed"]),
        ({**P, "what": {"kind": "b", "size": 4}}, {**P, "what": {"kind": "b"}},
         ["what.size: default added"]),
        ({**P, "old": "x"}, {**P, "old_str": "x"}, ["old: named old_str"]),
        (P, {**P, "invented": 3}, ["invented: argument that the tool does not take dropped"]),
        ({**P, "file": "a"}, P, ["file: copy that the tool does not take added"]),
        ({**P, "kind": "path"}, P, ["kind: copy that the tool does not take added"]),
        ({"all": False, "new": "x", **P}, {**P, "new": "x"}, ["all: default added"]),
        ({"path": "ls"}, {"path": "cd /a/b && ls"}, ["path: rewritten"]),
        ({"path": "x \\;"}, {"path": "cd /a && x \\\\;"}, ["path: rewritten"]),
        ({"path": "é😀"}, {"path": "\\u00e9\\ud83d\\ude00"}, ["path: escapes decoded"]),
        ({"path": "a"}, {"path": "a"}, []),
        ({"path": 1000}, {"path": 1e3}, []),
        ({"__unparsedToolInput": {"raw": '{"path": ', "len": 9}}, '{"path": ',
         ["unreadable arguments quoted"]),
        ({"INVALID_JSON": '{"path": '}, '{"path": ', ["unreadable arguments quoted"]),
        ({"arguments": '{"path": '}, '{"path": ', []),
        ('{"path": ', '{"path": ', []),
        ({}, '{"path": ', ["unreadable arguments dropped"]),
        ({"raw": "[" * 2048, "len": 9000}, "[" * 9000, ["unreadable arguments quoted"]),
    ],
)  # fmt: skip
def test_change_of_a_client_is_named(sent: Any, kept: Any, changes: list[str]) -> None:
    assert compared(sent, kept) == tuple(changes)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ({**P, "all": True}, P),  # not the default
        ({**P, "backup": False}, P),  # the default is true
        (P, {**P, "backup": False}),
        ({**P, "backup": None}, P),  # null is not the default
        ({**P, "line": 1}, P),  # no default
        ({}, P),
        ({"path": None}, {}),  # required
        ({**P, "line": 3}, {**P, "line": "2"}),
        ({**P, "either": 5}, {**P, "either": "5"}),  # both types are allowed
        ({**P, "either": "5"}, {**P, "either": 5}),
        ({**P, "note": None}, {**P, "note": "null"}),
        ({**P, "new": "b"}, {**P, "new": " b"}),  # the indent of the first line
        ({**P, "new": "a b"}, {**P, "new": "a  b"}),
        ({**P, "new": "a "}, {**P, "new": "a"}),  # a client does not add blanks
        ({**P, "new": "a\nb "}, {**P, "new": "a \nb "}),  # nor trim some of the lines
        ({**P, "new": "a"}, {**P, "new": "a\n"}),  # nor the last line end
        ({**P, "new": "a\nb"}, {**P, "new": "a\n\nb"}),
        ({**P, "new": "a\nb"}, {**P, "new": "a\r\nb"}),
        ({**P, "tags": ["x", "y"]}, {**P, "tags": ["y", "x"]}),
        ({**P, "tags": ["x"]}, {**P, "tags": ["x", "x"]}),
        ({**P, "what": {"kind": "b", "size": 3}}, {**P, "what": {"kind": "b"}}),  # default of a
        ({**P, "more": 1}, P),
        ({**P, "more": "b"}, P),  # no copy
        ({**P, "new": "a"}, P),  # a copy that the tool does take
        ({**P, "old": "y"}, {**P, "old_str": "x"}),
        ({"path": "rm -rf x"}, {"path": "cd /a || rm -rf x"}),
        ({"path": "a"}, "not JSON"),
        ({"raw": "not JSON at all"}, "not JSON"),
        ({"raw": "n"}, "not JSON"),
        ("not JSON", {"path": "a"}),
    ],
)
def test_other_differences_make_another_call(sent: Any, kept: Any) -> None:
    assert compared(sent, kept) is None


def test_another_id_or_name_is_another_call() -> None:
    assert compared({**P, "all": False}, P, sent_id="d") is None
    assert compared(P, P, sent_name="write") is None
    assert compared(P, P, sent_name="Edit") == ("name in another case",)
    quoted = {"tool": "edit", "error": "Invalid input"}
    assert compared(quoted, P, sent_name="invalid") == ("quoted as a call of invalid",)
    assert compared({"tool": "write"}, P, sent_name="invalid") is None
    said = ("quoted as a call of unparseable_tool_call",)
    assert compared({}, P, sent_name="unparseable_tool_call") == said
    assert compared({}, P, sent_name="another_tool") is None


def test_undeclared_arguments_of_an_open_schema_are_not_dropped() -> None:
    assert compared(P, {**P, "more": 1}, {"properties": {"path": {"type": "string"}}}) is None
    assert compared(P, {**P, "more": 1}, {}) is None


def test_copies_that_an_open_schema_takes_make_another_call() -> None:
    assert compared({**P, "more": "a"}, P, {"properties": {"path": {"type": "string"}}}) is None
    assert compared({**P, "more": "a"}, P, {}) is None


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), VALUES)
def test_what_comes_back_as_it_was_has_no_changes(kept: dict[str, Any], schema: Any) -> None:
    whole = schema if isinstance(schema, dict) else {"properties": schema}
    assert compared(kept, kept, whole) == ()


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=5), min_size=1), st.data())
def test_a_changed_text_is_another_call(kept: dict[str, str], data: Any) -> None:
    """Except where only blanks at the ends of lines are gone, or escapes are read."""
    key = data.draw(st.sampled_from(sorted(kept)))
    other = data.draw(st.text(max_size=5))
    bare = re.sub(r"\s+$", "", kept[key], flags=re.MULTILINE)
    if other == kept[key] or re.sub(r"\s+$", "", other, flags=re.MULTILINE) == bare:
        return
    if "\\" in kept[key] or other.strip() == kept[key].strip():
        return
    assert compared({**kept, key: other}, kept) is None


def test_hostile_schemas_take_little_work() -> None:
    loop = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 20}}, "$ref": "#/$defs/A"}
    wide = {"anyOf": [{"anyOf": [{"anyOf": [{"type": "object"}] * 50}] * 50}] * 50}
    for schema in (loop, wide):
        assert compared({"a": [{"b": 1}]}, {"a": [{"b": 2}]}, schema) is None
    commands = "cd /a && " * 100
    assert compared({"path": commands[:450] + "x"}, {"path": commands}) is None
