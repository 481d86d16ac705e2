"""The arguments that the census draws from a tool's schema."""

from __future__ import annotations

from typing import Any

from tests.e2e.agents.census.schemas import AWKWARD, Arguments


def test_arguments_follow_the_schema_and_are_awkward() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "kind": {"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]},
            "count": {"type": "integer", "exclusiveMinimum": 0},
            "items": {"type": "array", "minItems": 2, "items": {"type": "string"}},
            "file_path": {"type": "string"},
            "any": {"description": "of any type"},
        },
        "required": ["text"],
        "$defs": {"kind": {"enum": ["a", "b"]}},
    }
    assert Arguments("/w", awkward=False).of(schema) == {"text": "alpha"}
    assert Arguments("/w", awkward=True).of(schema) == {
        "text": AWKWARD[0],
        "kind": "b",
        "count": "1",
        "items": [AWKWARD[1]] * 2,
        "file_path": "/w/notes.txt",
        "any": AWKWARD[0],
    }
