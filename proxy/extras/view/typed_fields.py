"""Values that other programs wrote, as the types of the page's answers.

Invariant: what is returned matches its schema in `/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import get_type_hints

from proxy.http.valid_json import write_json

T = TypeVar("T")


def as_type(kind: type[T], value: object) -> T | None:
    """The value if it is one of the typed dictionary `kind`. NaN counts as null."""
    try:
        return adapter_of(kind).validate_json(write_json(value), strict=True)
    except ValidationError:
        return None


def fitting(kind: type[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the typed dictionary `kind` whose values have its types."""
    fields = _fields(cast("Any", kind))
    there = {name: found[name] for name in fields if name in found}
    whole = as_type(kind, there)
    if whole is not None:
        return dict(whole)
    kept: dict[str, Any] = {}
    for name, value in there.items():
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            kept[name] = fields[name].validate_json(write_json(value), strict=True)
        except ValidationError:
            continue
    return kept


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """Checks JSON against a type; made once."""
    return _adapter(cast("Any", kind))


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _fields(kind: type[Any]) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind).items()}
