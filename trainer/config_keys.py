"""The keys of a configuration, read from the sections that define them.

Invariant: a key's text is the docstring below its field, and its bounds are the bounds that are
checked, so that the documentation of a key cannot differ from the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.algorithms.part import NamedPart, Parts


@dataclass(frozen=True, slots=True)
class Key:
    """Example: Key("algorithm.loss[gspo].clip_low", "Lower bound of …", field)"""

    path: str
    """The dotted path, with the part's name in brackets if a section is one of several parts."""
    text: str
    """The docstring below the field; empty if there is none."""
    field: FieldInfo
    sections: tuple[type[BaseModel], ...]
    """The sections that the key may hold: none for a value, several if one of them is chosen."""

    @property
    def part_names(self) -> list[str]:
        """The names of the parts of an algorithm of which the key holds one or several."""
        return [_name_of(each) for each in self.sections if issubclass(each, NamedPart)]

    @property
    def dotted(self) -> str:
        """The path as it is written on the command line. Example: algorithm.loss.clip_low"""
        return re.sub(r"\[[^]]*\]", "", self.path)


def keys_of(
    model: type[BaseModel], prefix: str = "", seen: frozenset[type[BaseModel]] = frozenset()
) -> Iterator[Key]:
    """Every key of the section and of its subsections, in the order of their definition."""
    documented = docstrings(model)
    for name, field in model.model_fields.items():
        if name == "name" and prefix.endswith("]"):
            continue  # the path contains the part's name
        path = f"{prefix}.{name}" if prefix else name
        nested = _parts(field.metadata) or tuple(_models(field.annotation))
        text = documented.get(name, "") or (_summary(nested[0]) if nested else "")
        yield Key(path, " ".join(text.split()), field, nested)
        for each in nested:
            if each not in seen:
                variant = path if len(nested) == 1 else f"{path}[{_name_of(each)}]"
                if typing.get_origin(field.annotation) in (dict, Mapping):
                    variant = f"{path}.NAME"
                yield from keys_of(each, variant, seen | {each})


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Name of a field of the class or its ancestors → the docstring below it."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef)
        field = ""
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                field = node.target.id
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and field:
                texts[field] = str(node.value.value)
                field = ""
            else:
                field = ""
    return texts


def _summary(model: type[BaseModel]) -> str:
    """The first paragraph of the section's docstring, without its example."""
    own = model.__doc__ if model.__doc__ != BaseModel.__doc__ else None
    first = (own or "").strip().partition("\n\n")[0].partition("Example:")[0]
    return re.sub(r"^(The `\S+` section of a run|Section `\S+`)[.:]\s*", "", first)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models in an annotation, including those in unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        kind, *metadata = typing.get_args(annotation)
        yield from _parts(metadata) or _models(kind)
    elif origin in (Union, types.UnionType, tuple, list, dict, Mapping):
        for part in typing.get_args(annotation):
            yield from _models(part)


def _parts(metadata: Iterable[Any]) -> tuple[type[BaseModel], ...]:
    """The classes of the registry in a field's annotation; empty if there is no registry in it."""
    for each in metadata:
        if isinstance(each, Parts):
            return each.classes
    return ()


def _name_of(model: type[BaseModel]) -> str:
    field = model.model_fields.get("name")
    return str(field.default) if field is not None else model.__name__
