"""Arguments for a tool from its own JSON Schema: plain ones, and ones that are awkward to carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.e2e.agents.census.policy import SUB_TASK

AWKWARD = (
    "  two blanks, été 数学 😀\n\ttab \"quoted\" <b>&amp;</b> 'x' \\n $HOME\n\n ",
    "123",
    "true",
    '{"a": [1, null]}',
    " 1e5",
    "-",
)
"""Blanks and line ends at both ends, characters outside the basic plane, and texts that look like
another type."""
_PATHS = ("path", "file", "filename", "directory", "dir", "cwd", "workdir", "root", "notebook")
_PROMPTS = ("prompt", "prompt_template", "task", "message", "systemprompt", "roleprompt")
_COMMANDS = ("command", "cmd", "script", "code")
MAX_DEPTH = 5


class Arguments:
    """Draws arguments for one call: `awkward`, or plain with every optional argument left out."""

    def __init__(self, workspace: str, *, awkward: bool) -> None:
        self._workspace = workspace
        self._awkward = awkward
        self._drawn = 0

    def of(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for a function with these `parameters`."""
        drawn = self._object(parameters, parameters, 0)
        return drawn if isinstance(drawn, dict) else {}

    def _value(self, schema: Any, root: Mapping[str, Any], name: str, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return AWKWARD[0] if schema is not False else None
        if "$ref" in schema:
            return self._value(_target(root, schema["$ref"]), root, name, depth)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][-1 if self._awkward else 0]
        for choice in ("anyOf", "oneOf", "allOf"):
            if schema.get(choice):
                return self._value(schema[choice][0], root, name, depth)
        if not schema.keys() & {"type", "properties"}:
            return AWKWARD[0]  # of any type: tags would make other types of the other texts
        kind = schema.get("type", "object")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            return self._object(schema, root, depth)
        if kind == "array":
            few = max(1, int(schema.get("minItems", 1)))
            return [self._value(schema.get("items", {}), root, name, depth + 1)] * few
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        if kind == "boolean":
            return self._awkward
        return None if kind == "null" else self._text(name, schema)

    def _object(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
        properties: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", [])
        wanted = [
            name for name in properties if name in required or (self._awkward and depth < MAX_DEPTH)
        ]
        return {name: self._value(properties[name], root, name, depth + 1) for name in wanted}

    def _number(self, schema: Mapping[str, Any], kind: str) -> Any:
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        number = low + 1 if "exclusiveMinimum" in schema else low
        number = min(max(number, 1), schema.get("maximum", number + 1))
        if not self._awkward:
            return number
        return float(number) if kind == "number" else str(number)  # a model may quote a number

    def _text(self, name: str, schema: Mapping[str, Any]) -> str:
        words = name.lower().replace("-", "_")
        if "url" in words or schema.get("format") == "uri":
            return "http://127.0.0.1:9/"
        if any(word in words for word in _PATHS):
            return f"{self._workspace}/notes.txt"
        if words in _PROMPTS:
            return f"{SUB_TASK} THREE: write it down.  é 😀"
        if words in _COMMANDS:
            return "printf ' é 😀 \\n'"
        if not self._awkward:
            return "alpha"
        self._drawn += 1
        return AWKWARD[(self._drawn - 1) % len(AWKWARD)]


def _target(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part, {}) if isinstance(found, Mapping) else {}
    return found
