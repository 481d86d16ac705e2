"""Decides whether a call that an agent sends back is the recorded one, tidied by its client.

A client may fill in or drop a default of the tool's schema, turn a string into the type that the
schema wants (or back), trim blanks at line ends, write null for an absent argument, copy an
argument under a name that the tool does not take, or quote a call that it could not read. All of
this is read off the schema that the request carries. Invariant: two calls are only compared if they
have the same id, which the proxy gave to exactly one sampled call; a difference that is none of
these makes them different calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from proxy.conversation.json_values import canonical_json, parsed_arguments, read_arguments
from proxy.conversation.messages import ToolCall

Schema = Mapping[str, Any]
Rewrites = Sequence[tuple[re.Pattern[str], str]]
"""What a profile adds: a client replaces matches of the pattern in a string by the text."""

QUOTED_CHARS = 1000
"""A quotation of a longer text may be cut after this number of characters: Claude Code cuts one at
2,048."""
MAX_VARIANTS = 32
"""Alternatives of a schema (`anyOf`, `oneOf`) that are tried."""
MAX_REFERENCES = 16
"""Depth of `$ref` and `anyOf` within each other."""
MAX_SCHEMAS = 2000
"""Schemas and alternatives that are looked at per call; the others allow anything."""
MAX_REWRITES = 100
"""Matches in a string that a client may have rewritten."""
MAX_CHANGES = 10
"""Changes of a call that are named."""


def tidied(
    sent: ToolCall,
    recorded: ToolCall,
    schema: Schema,
    *,
    rewrites: Rewrites = (),
    stand_ins: Sequence[str] = (),
) -> tuple[str, ...] | None:
    """What the client changed in the recorded call; None if the two are different calls.

    `schema` is that of the tool's arguments ({} if it is not known), and `stand_ins` are names of
    tools under which the agent quotes a call of a tool that it could not make, with its name or
    without arguments.

    Example: ("replace_all: default added", "timeout: text became a number")
    """
    if sent.id != recorded.id:
        return None
    given, kept = parsed_arguments(sent.arguments), read_arguments(recorded.arguments)
    if sent.name != recorded.name:
        if sent.name in stand_ins and (given == {} or recorded.name in _texts(given)):
            return (f"quoted as a call of {sent.name}",)
        if sent.name.casefold() != recorded.name.casefold():
            return None
    if not isinstance(kept, dict):
        return _quoted(given, kept, recorded.arguments)
    if not isinstance(given, dict):
        return None
    changes = _Comparison(schema, rewrites).changes("", given, kept, schema)
    if changes is None:
        return None
    if sent.name != recorded.name:
        changes.append("name in another case")
    return tuple(changes[:MAX_CHANGES])


def _quoted(given: Any, kept: Any, written: str) -> tuple[str, ...] | None:
    """How the agent quotes arguments that are not a JSON object: as they are, as a string somewhere
    in an object of its own, or as no arguments."""
    if given == kept or (isinstance(given, dict) and given == {"arguments": kept}):
        return ()
    if given == {}:
        return ("unreadable arguments dropped",)
    texts = [text for text in _texts(given) if text]
    if any(_is_quotation(text, written) for text in texts):
        return ("unreadable arguments quoted",)
    return None


def _is_quotation(text: str, written: str) -> bool:
    whole = written.strip()
    return text.strip() == whole or (len(text) >= QUOTED_CHARS and whole.startswith(text.strip()))


def _texts(value: Any, levels: int = 3) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif levels and isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner, levels - 1)


class _Comparison:
    """Compares values by a schema, whose `$ref`s are looked up in `root`."""

    def __init__(self, root: Schema, rewrites: Rewrites) -> None:
        self._root = root
        self._rewrites = rewrites
        self._known: dict[int, tuple[Any, list[Schema]]] = {}
        """By the identity of a schema, which is kept alive: the schema and its alternatives."""

    def changes(self, path: str, given: Any, kept: Any, schema: Any) -> list[str] | None:
        """What was changed in `kept` to get `given`; None if it is another value."""
        if isinstance(given, dict) and isinstance(kept, dict):
            return self._of_objects(path, given, kept, schema)
        if isinstance(given, list) and isinstance(kept, list):
            return self._of_lists(path, given, kept, schema)
        if canonical_json(given) == canonical_json(kept):
            return []
        if isinstance(given, str) and isinstance(kept, str):
            change = _trimmed_or_rewritten(given, kept, self._rewrites)
        else:
            change = _coerced(given, kept, self._types(schema))
        return None if change is None else [f"{path}: {change}"]

    def _of_lists(
        self, path: str, given: list[Any], kept: list[Any], schema: Any
    ) -> list[str] | None:
        if len(given) != len(kept):
            return None
        for variant in self._variants(schema):
            items, before = variant.get("items"), variant.get("prefixItems")
            each = before if isinstance(before, list) else []
            found: list[str] = []
            for at, (one, other) in enumerate(zip(given, kept, strict=True)):
                inner = each[at] if at < len(each) else items
                changes = self.changes(f"{path}[{at}]", one, other, inner)
                if changes is None:
                    break
                found += changes
            else:
                return found
        return None

    def _of_objects(
        self, path: str, given: dict[str, Any], kept: dict[str, Any], schema: Any
    ) -> list[str] | None:
        for variant in self._variants(schema):
            if self._admits(variant, kept):
                changes = self._by_variant(path, given, kept, variant)
                if changes is not None:
                    return changes
        return None

    def _by_variant(
        self, path: str, given: dict[str, Any], kept: dict[str, Any], variant: Schema
    ) -> list[str] | None:
        declared = _object(variant.get("properties"))
        more = variant.get("additionalProperties")
        found: list[str] = []
        for key in given.keys() & kept.keys():
            inner = self.changes(_join(path, key), given[key], kept[key], declared.get(key, more))
            if inner is None:
                return None
            found += inner
        added, dropped = given.keys() - kept.keys(), kept.keys() - given.keys()
        unknown = {key for key in dropped if declared and key not in declared}
        for key in added:
            why = self._left_out(key, given[key], variant)
            if why is None and more is False and _is_copy(key, given, declared):
                why = "copy that the tool does not take"
            if why is None:
                alias = next((k for k in unknown if self._same_as(given[key], kept[k])), None)
                if alias is None or key not in declared:
                    return None
                unknown.discard(alias)
                dropped = dropped - {alias}
                found.append(f"{_join(path, key)}: named {alias}")
            else:
                found.append(f"{_join(path, key)}: {why} added")
        for key in dropped:
            why = self._left_out(key, kept[key], variant)
            if why is None and key in unknown and more is False:
                why = "argument that the tool does not take"
            if why is None:
                return None
            found.append(f"{_join(path, key)}: {why} dropped")
        return sorted(found)

    def _same_as(self, given: Any, kept: Any) -> bool:
        return self.changes("", given, kept, None) is not None

    def _left_out(self, key: str, value: Any, variant: Schema) -> str | None:
        """Why `value` means the same as no value for the property `key`."""
        schema = _object(variant.get("properties")).get(key)
        if schema is not None:
            defaults = [v["default"] for v in self._variants(schema) if "default" in v]
            if any(canonical_json(value) == canonical_json(default) for default in defaults):
                return "default"
            if defaults and None not in defaults:
                return None
        required = variant.get("required")
        if value is None and not (isinstance(required, list) and key in required):
            return "null"
        return None

    def _admits(self, variant: Schema, kept: dict[str, Any]) -> bool:
        """Whether the object has the constants that tell this alternative from the others."""
        for key, schema in _object(variant.get("properties")).items():
            if key in kept and isinstance(schema, dict):
                allowed = [schema["const"]] if "const" in schema else schema.get("enum")
                if isinstance(allowed, list) and len(allowed) == 1 and kept[key] != allowed[0]:
                    return False
        return True

    def _types(self, schema: Any) -> set[str]:
        """The JSON types that the schema allows; empty for all of them."""
        found: set[str] = set()
        for variant in self._variants(schema):
            kind, values = variant.get("type"), variant.get("enum")
            if isinstance(kind, str):
                found.add(kind)
            elif isinstance(kind, list):
                found.update(each for each in kind if isinstance(each, str))
            elif isinstance(values, list) or "const" in variant:
                found.update(map(_type_of, values or [variant.get("const")]))
            elif "properties" in variant:
                found.add("object")
            elif "items" in variant:
                found.add("array")
            else:
                return set()
        return found

    def _variants(self, schema: Any, levels: int = MAX_REFERENCES) -> list[Schema]:
        """The alternatives of a schema, without `$ref`, `allOf`, `anyOf` and `oneOf`."""
        if not isinstance(schema, dict) or levels == 0 or len(self._known) > MAX_SCHEMAS:
            return [{}]
        if id(schema) not in self._known:
            found = self._alternatives(schema, levels)
            self._known[id(schema)] = (schema, found)
        return self._known[id(schema)][1]

    def _alternatives(self, schema: dict[str, Any], levels: int) -> list[Schema]:
        name = schema.get("$ref")
        if isinstance(name, str):
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return [{**found, **rest} for found in self._variants(self._referred(name), levels - 1)]
        for word in ("allOf", "anyOf", "oneOf"):
            parts = schema.get(word)
            if isinstance(parts, list) and parts:
                rest = {key: value for key, value in schema.items() if key != word}
                inner = [self._variants(part, levels - 1) for part in parts]
                if word == "allOf":
                    merged = rest
                    for each in inner:
                        merged = _merged(each[0], merged)
                    return self._variants(merged, levels - 1)
                flat = [variant for each in inner for variant in each][:MAX_VARIANTS]
                found = [
                    variant
                    for each in flat
                    for variant in self._variants(_merged(each, rest), levels - 1)
                ]
                return found[:MAX_VARIANTS]
        return [schema]

    def _referred(self, name: str) -> Any:
        if not name.startswith("#"):
            return {}
        found: Any = self._root
        for step in name[1:].split("/")[1:]:
            found = _object(found).get(step.replace("~1", "/").replace("~0", "~"))
        return found


def _trimmed_or_rewritten(given: str, kept: str, rewrites: Rewrites) -> str | None:
    forms = [(kept, "")]
    if "\\u" in kept and (decoded := _decoded(kept)) != kept:
        forms.append((decoded, "escapes decoded"))
    for form, why in forms:
        if given == form:
            return why
        if given == _trimmed(form):
            return f"{why}, blanks trimmed".removeprefix(", ")
        if _is_rewritten(given, form, rewrites):
            return f"{why}, rewritten".removeprefix(", ")
    return None


def _is_rewritten(given: str, kept: str, rewrites: Rewrites) -> bool:
    """Whether `given` is `kept` with some of the matches replaced."""
    matches = [
        (found.start(), found.end(), found.expand(text))
        for pattern, text in rewrites
        for found in islice(pattern.finditer(kept), MAX_REWRITES)
        if found[0]
    ]
    ends, at = {0}, 0  # where `given` may be when `kept` is read up to `at`
    for start, end, text in sorted(matches):
        if start >= at:
            ends = _after(given, ends, kept[at:start])
            ends = _after(given, ends, kept[start:end]) | _after(given, ends, text)
            at = end
    return bool(matches) and len(given) in _after(given, ends, kept[at:])


def _after(given: str, starts: set[int], text: str) -> set[int]:
    return {start + len(text) for start in starts if given.startswith(text, start)}


_BLANKS = (
    "\t\n\v\f\r \N{NO-BREAK SPACE}\N{OGHAM SPACE MARK}\u2000\u2001\u2002\u2003\u2004\u2005\u2006"
    "\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
)
"""What `\\s` matches in JavaScript."""
_LINE_ENDS = re.compile(r"(\r\n|\n|\r)")


def _trimmed(text: str) -> str:
    """Without blanks at the end of each line; the line ends stay as they are."""
    parts = _LINE_ENDS.split(text)
    parts[::2] = [line.rstrip(_BLANKS) for line in parts[::2]]
    return "".join(parts)


_ESCAPE = re.compile(
    r"(?<!\\)(?P<even>(?:\\\\)*)\\u(?:(?P<high>[dD][89aAbB][0-9a-fA-F]{2})\\u"
    r"(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})|(?![dD][89a-fA-F])(?P<code>[0-9a-fA-F]{4}))"
)


def _decoded(text: str) -> str:
    """With the characters that `\\uXXXX` names in the place of these escapes."""

    def character(found: re.Match[str]) -> str:
        if found["code"]:
            return found["even"] + chr(int(found["code"], 16))
        high, low = int(found["high"], 16), int(found["low"], 16)
        return found["even"] + chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))

    return _ESCAPE.sub(character, text)


def _coerced(given: Any, kept: Any, types: set[str]) -> str | None:
    """Whether one value is the text of the other, and the schema wants the type of `given`."""
    wanted = _type_of(given)
    if isinstance(kept, str):
        if wanted not in types and not (wanted == "integer" and "number" in types):
            return None
        # Some clients read a list or an object also where a string would do.
        if "string" in types and wanted not in ("array", "object"):
            return None
        same = _read(kept, given)
        return f"text became {_NAMES[wanted]}" if same else None
    if isinstance(given, str) and types and _type_of(kept) not in types and "string" in types:
        if _type_of(kept) == "integer" and "number" in types:
            return None
        return f"{_NAMES[_type_of(kept)]} became text" if _read(given, kept) else None
    return None


def _read(text: str, value: Any) -> bool:
    """Whether the text is that of the value, which is not a string."""
    word = text.strip()
    if isinstance(value, bool) or value is None:
        return word.casefold() in {True: ("true",), False: ("false",), None: ("null",)}[value]
    read = parsed_arguments(word.removeprefix("+")) if word else None
    return not isinstance(read, str | bool | None) and canonical_json(read) == canonical_json(value)


_NAMES = {
    "integer": "a number",
    "number": "a number",
    "boolean": "a boolean",
    "null": "null",
    "array": "a list",
    "object": "an object",
    "string": "text",
}


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_copy(key: str, given: dict[str, Any], declared: dict[str, Any]) -> bool:
    """Whether `key`, which the tool does not declare, repeats the value or the name of an argument
    that it does. Claude Code stores a `SendMessage` with `content` and `recipient`, which are its
    `message` and `to`, and with `type: "message"`."""
    if key in declared:
        return False
    taken, value = given.keys() & declared.keys(), given[key]
    if isinstance(value, str) and value in taken:
        return True
    return any(canonical_json(value) == canonical_json(given[each]) for each in taken)


def _merged(schema: Schema, over: Schema) -> dict[str, Any]:
    """Both schemas as one; properties of both."""
    merged = {**schema, **over}
    if "properties" in schema and "properties" in over:
        merged["properties"] = {**_object(schema["properties"]), **_object(over["properties"])}
    return merged


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
