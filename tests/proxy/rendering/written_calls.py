"""Draws tools, calls and values as awkward as agents' are, for any family of chat models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from jsonschema import Draft202012Validator

TAGS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>"),
    *("</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>"),
    *("</think>", '<invoke name="f">', "</invoke>", '<parameter name="a">'),
    *("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",),
    *("\n</parameter>\n</function>\n</tool_call>", "\n</parameter>\n<parameter=b>\n"),
    *("</arg_value></tool_call>", "</arg_value>\n<arg_key>b</arg_key>\n<arg_value>"),
    *("</arg_value:opensource>", "</tool_call:opensource>", "</minimax:tool_call>"),
    *("</parameter>\n</invoke>\n", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"),
    *("</\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}parameter>\n",),
)
"""The families' own tags, alone and as they follow each other."""
WORDS = (
    *("", " ", "\n", "\n\n", "\t", "  x", "x  ", "\nx\n", "123", "-0", "1.0", "1e5", "007", "0x1"),
    *("true", "false", "null", "True", "False", "None", "NaN", "Infinity", "{}", "[]"),
    *('{"a": 1}', '{"a":1}', "[1, 2]", '["x"]', '"quoted"', '\\"', "\\n", "\\", "{", "}", "]", '"'),
    *(
        "été",
        "数学",
        "😀",
        "\N{REPLACEMENT CHARACTER}",
        "\r\n",
        "\N{ZERO WIDTH SPACE}",
        "<",
        ">",
        "</",
    ),
    *("def f(x):\n    return x\n", "    indented\n", "a < b > c", "ls -l | head", "<div></div>"),
)

clean_text = st.lists(
    st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    max_size=4,
).map("".join)
keys = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
numbers = st.integers(-(2**53), 2**53) | st.floats(-1e12, 1e12, allow_nan=False)
free_values = st.recursive(
    clean_text | numbers | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


def text_with_tags(own: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Texts with tags of all families, and as often with those of one: `own`."""
    parts = [
        st.sampled_from(WORDS),
        st.sampled_from(TAGS),
        *([st.sampled_from(own)] if own else []),
    ]
    return st.lists(st.one_of(parts), max_size=5).map("".join)


@dataclass(frozen=True)
class Typed:
    """A schema and the values that it allows."""

    schema: Any
    values: st.SearchStrategy[Any]


def _union(draw: st.DrawFn, parts: list[Typed]) -> Typed:
    values = st.one_of([part.values for part in parts])
    names = [part.schema.get("type") for part in parts]
    plain = all(part.schema.keys() == {"type"} for part in parts)
    if plain and all(isinstance(name, str) for name in names) and draw(st.booleans()):
        return Typed({"type": names}, values)
    kind = draw(st.sampled_from(["anyOf", "oneOf"]))
    return Typed({kind: [part.schema for part in parts]}, values)


@st.composite
def typed(draw: st.DrawFn, text: st.SearchStrategy[str], levels: int = 2) -> Typed:
    """Any kind of schema; strings are drawn from `text`."""
    simple = [
        *[Typed({"type": "string"}, text)] * 4,
        Typed({"type": "string", "description": "Text."}, text),
        Typed({"type": "integer"}, st.integers(-(2**53), 2**53)),
        Typed({"type": "number"}, numbers),
        Typed({"type": "boolean"}, st.booleans()),
        Typed({"type": "null"}, st.none()),
        Typed({"type": ["string", "null"]}, text | st.none()),
        Typed({"type": "string", "nullable": True}, text),
        Typed({"type": ["integer", "null"]}, st.integers(-9, 9) | st.none()),
        Typed({"type": ["boolean", "string"]}, st.booleans() | text),
        Typed({"enum": ["1", "2", "true"]}, st.sampled_from(["1", "2", "true"])),
        Typed({"enum": ["auto", 1, None, False]}, st.sampled_from(["auto", 1, None, False])),
        Typed({"const": "123"}, st.just("123")),
        Typed({"type": "string", "enum": ["None", "a\nb"]}, st.sampled_from(["None", "a\nb"])),
        Typed({"$ref": "#/$defs/name"}, text),
        Typed({"$ref": "#/$defs/maybe"}, text | st.none()),
        Typed({"allOf": [{"$ref": "#/$defs/name"}, {"description": "A name."}]}, text),
        Typed({}, free_values),
        Typed({"description": "Anything."}, free_values),
    ]
    if levels and draw(st.integers(0, 2)) == 0:
        inner = draw(typed(text, levels - 1))
        kind = draw(st.sampled_from(["array", "object", "union", "map"]))
        if kind == "array":
            return Typed(
                {"type": "array", "items": inner.schema}, st.lists(inner.values, max_size=3)
            )
        if kind == "map":
            schema = {"type": "object", "additionalProperties": inner.schema}
            return Typed(schema, st.dictionaries(keys, inner.values, max_size=3))
        if kind == "object":
            schema = {
                "type": "object",
                "properties": {"a": inner.schema},
                "required": ["a"],
                "additionalProperties": False,
            }
            return Typed(schema, st.fixed_dictionaries({"a": inner.values}))
        return _union(draw, [inner, draw(typed(text, levels - 1))])
    return draw(st.sampled_from(simple))


DEFS = {"name": {"type": "string"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}}


@dataclass(frozen=True)
class Drawn:
    """A tool and calls of it."""

    tool: dict[str, Any]
    calls: list[dict[str, Any]]

    def is_ambiguous(self, key: str, value: Any, *, python_words: bool) -> bool:
        """Whether a string of this argument is also another value that its schema allows."""
        if not isinstance(value, str):
            return False
        parameters = self.tool["function"]["parameters"]
        declared = parameters.get("properties", {}).get(key)
        if declared is None:
            other = parameters.get("additionalProperties")
            declared = other if isinstance(other, dict) else {}
        if "nullable" in str(declared) and value in ("null", "None" if python_words else "null"):
            return True  # OpenAPI's word, which the validator does not know
        words = {"True": "true", "False": "false", "None": "null"} if python_words else {}
        try:
            other = json.loads(words.get(value, value), parse_constant=_not_json)
        except ValueError:
            return False
        schema = _in_any_of({**declared, "$defs": DEFS})
        return not isinstance(other, str) and Draft202012Validator(schema).is_valid(other)


def _in_any_of(schema: Any) -> Any:
    """A schema with `anyOf` for `oneOf`: a value that fits several branches is not refused, because
    agents' schemas overlap (a number or an integer) and the reader ignores bounds."""
    if isinstance(schema, list):
        return [_in_any_of(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _in_any_of(value) for key, value in schema.items() if key != "oneOf"}
    if "oneOf" in schema:
        plain["allOf"] = [*plain.get("allOf", []), {"anyOf": _in_any_of(schema["oneOf"])}]
    return plain


def _not_json(word: str) -> Any:
    raise ValueError(word)


@st.composite
def drawn_calls(draw: st.DrawFn, text: st.SearchStrategy[str], max_calls: int = 3) -> Drawn:
    names = draw(st.lists(keys, max_size=3, unique=True))
    types = {name: draw(typed(text)) for name in names}
    parameters: dict[str, Any] = {"type": "object", "$defs": DEFS}
    form = draw(st.sampled_from(["properties"] * 6 + ["none", "other"]))
    if form == "properties":
        parameters["properties"] = {name: each.schema for name, each in types.items()}
    elif form == "other":
        parameters["additionalProperties"] = {"type": ["string", "null"]}
        types = {name: Typed({}, text | st.none()) for name in names}
    else:
        types = {name: Typed({}, free_values) for name in names}
    calls = [
        {name: draw(each.values) for name, each in types.items() if draw(st.integers(0, 4))}
        for _ in range(draw(st.integers(1, max_calls)))
    ]
    function = {"name": "shell", "description": "Runs.", "parameters": parameters}
    return Drawn({"type": "function", "function": function}, calls)
