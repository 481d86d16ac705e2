"""The text of one argument → JSON, by what the tool's own schema allows.

Families that write one tag per argument write a string as it is, without quotes, so that `123` may
be a number or a string. Invariant: a text stays exactly that string if the schema allows a string
and no other type that it allows fits the text. If it allows no string, the text is JSON if it can
be read as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_MAX_LEVELS = 32
"""Nesting of schemas and references that is followed; what is deeper allows everything."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_JSON_BEGINS = frozenset('{[-0123456789tfn"')
_OF_PYTHON: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
    dict: ("object",),
    list: ("array",),
}


class ArgumentType:
    """What one argument of a tool may be. `schema` is None if nothing is declared."""

    def __init__(self, schema: Any, root: Any) -> None:
        """`root` is the schema that `#` refers to."""
        self._schema = schema
        self._root = root
        self.allowed = _allowed(schema, root, _MAX_LEVELS)
        """The JSON types that the schema allows."""

    def is_surely_text(self, begun: str, *, python_words: bool) -> bool:
        """Whether any value that begins with `begun` is a string, so that it can be streamed."""
        if "string" not in self.allowed:
            return False
        if self.allowed == {"string"}:
            return True
        other = begun[:1] in _JSON_BEGINS - {'"'} or (python_words and begun[:1] in "TFN")
        return bool(begun) and not other

    def to_json(self, text: str, *, python_words: bool) -> str:
        """`python_words`: the family writes `True`, `False` and `None`."""
        if self.allowed == {"string"}:
            return _quoted(text)
        if "string" not in self.allowed:
            word = text.strip()
            if _value(word) is not _NOTHING:
                return word
            return _PYTHON_WORDS.get(word) or _quoted(text)
        written = _PYTHON_WORDS.get(text, text) if python_words else text
        if written[:1] in _JSON_BEGINS and written == written.strip():
            value = _value(written)
            if value is not _NOTHING and not isinstance(value, str) and self._fits(value):
                return written
        return _quoted(text)

    def _fits(self, value: Any) -> bool:
        return _fits(value, self._schema, self._root, _MAX_LEVELS)


def argument_type(parameters: Any, key: str) -> ArgumentType:
    """The type of the argument `key` of a tool with these `parameters` (a JSON Schema)."""
    found = list(_declared(parameters, parameters, key, _MAX_LEVELS))
    return ArgumentType(found[0] if len(found) == 1 else {"anyOf": found or [{}]}, parameters)


def declared_keys(parameters: Any) -> set[str]:
    """The names of the arguments that a tool declares."""
    return {key for schema in _objects(parameters, parameters, _MAX_LEVELS) for key in schema}


def tool_parameters(tools: list[dict[str, Any]], name: str) -> Any:
    """The JSON Schema of a tool's arguments; None if it has none or is not offered."""
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            return function.get("parameters")
    return None


_NOTHING = object()


def _value(text: str) -> Any:
    """The JSON value; `_NOTHING` if the text is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _NOTHING


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()


def _branches(schema: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list):
            yield from branches


def _objects(schema: Any, root: Any, levels: int) -> Iterator[Mapping[str, Any]]:
    """The `properties` of a schema of objects, and of the parts that it is made of."""
    if not isinstance(schema, Mapping) or not levels:
        return
    if isinstance(schema.get("properties"), Mapping):
        yield schema["properties"]
    if "$ref" in schema:
        yield from _objects(_referred(schema["$ref"], root), root, levels - 1)
    for branch in _branches(schema):
        yield from _objects(branch, root, levels - 1)


def _declared(schema: Any, root: Any, key: str, levels: int) -> Iterator[Any]:
    declared = [each[key] for each in _objects(schema, root, levels) if key in each]
    if declared:
        yield from declared
    elif isinstance(schema, Mapping) and isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]


def _referred(reference: Any, root: Any) -> Any:
    """What `#/$defs/name` refers to; an empty schema, which allows everything, if it is unknown."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return {}
    return found


def _names(declared: Any) -> frozenset[str]:
    """The types that `type` names; all if one is unknown."""
    names = declared if isinstance(declared, list) else [declared]
    known = {name.lower() for name in names if isinstance(name, str)}
    if not known or not known <= _TYPES:
        return _TYPES
    return frozenset(known | {"integer"} if "number" in known else known)


def _allowed(schema: Any, root: Any, levels: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not levels:
        return _TYPES
    allowed = _names(schema["type"]) if "type" in schema else _TYPES
    if "$ref" in schema:
        allowed &= _allowed(_referred(schema["$ref"], root), root, levels - 1)
    members = _members(schema)
    if members is not None:
        allowed &= frozenset(name for each in members for name in _OF_PYTHON.get(type(each), ()))
    for branch in _list(schema, "allOf"):
        allowed &= _allowed(branch, root, levels - 1)
    for name in ("anyOf", "oneOf"):
        if _list(schema, name):
            branches = [_allowed(branch, root, levels - 1) for branch in _list(schema, name)]
            allowed &= frozenset().union(*branches)
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _members(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that `enum` or `const` allow; None without them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _fits(value: Any, schema: Any, root: Any, levels: int) -> bool:
    """Whether a value has the types and members that a schema asks for; bounds are ignored."""
    if schema is False:
        return False
    if not isinstance(schema, Mapping) or not levels:
        return True
    if value is None and schema.get("nullable") is True:
        return True
    if "type" in schema and not _is_of(value, _names(schema["type"])):
        return False
    members = _members(schema)
    if members is not None and not any(_equal(value, each) for each in members):
        return False
    below = levels - 1
    if "$ref" in schema and not _fits(value, _referred(schema["$ref"], root), root, below):
        return False
    if not all(_fits(value, branch, root, below) for branch in _list(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        branches = _list(schema, name)
        if branches and not any(_fits(value, branch, root, below) for branch in branches):
            return False
    if isinstance(value, list):
        return _items_fit(value, schema, root, below)
    return not isinstance(value, dict) or _members_fit(value, schema, root, below)


def _is_of(value: Any, names: frozenset[str]) -> bool:
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return not names.isdisjoint(_OF_PYTHON[type(value)])


def _equal(value: Any, member: Any) -> bool:
    return bool(value == member) and isinstance(value, bool) == isinstance(member, bool)


def _items_fit(value: list[Any], schema: Mapping[str, Any], root: Any, levels: int) -> bool:
    first = _list(schema, "prefixItems")
    pairs = list(zip(value, first, strict=False))
    if "items" in schema and not isinstance(schema["items"], list):
        pairs += [(each, schema["items"]) for each in value[len(first) :]]
    return all(_fits(each, inner, root, levels) for each, inner in pairs)


def _members_fit(value: dict[str, Any], schema: Mapping[str, Any], root: Any, levels: int) -> bool:
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    if any(name not in value for name in _list(schema, "required")):
        return False
    other = schema.get("additionalProperties", True)
    if "patternProperties" in schema:
        other = True
    return all(_fits(each, known.get(key, other), root, levels) for key, each in value.items())
