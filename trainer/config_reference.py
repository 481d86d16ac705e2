"""`docs/configuration.md`: every key of a run's configuration, from where it is defined.

    python -m trainer.config_reference > docs/configuration.md

Invariant: a key's text is the docstring behind its field, and its bounds are those that are
checked, so the page cannot say what the code does not.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Union

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trainer.config import TrainerConfig
from trainer.config_sources import ENV_PREFIX, VERL_NAMES

HEAD = f"""# Configuration of a run

`agentic-train --config FILE [key=value …]`. Sources, the nearest first: command line, environment,
YAML file, default. Values on the command line and in the environment are YAML. Every key has the
environment variable `{ENV_PREFIX}SECTION__KEY`, and some the name that verl's recipe gives it. The
resolved configuration is printed at start and stored in the run's folder.

Made by `python -m trainer.config_reference`; each text is that of the field's definition.
"""


def main() -> None:
    print(reference(), end="")  # noqa: T201 (the page is this program's output)


def reference() -> str:
    verl = {key: name for name, key in VERL_NAMES.items()}
    parts = [HEAD]
    for section, field in TrainerConfig.model_fields.items():
        parts.append(f"\n## {section}\n")
        model = next(_models(field.annotation))
        parts += _keys(model, section, verl, set())
    return "\n".join(parts) + "\n"


def _keys(
    model: type[BaseModel], prefix: str, verl: dict[str, str], seen: set[type[BaseModel]]
) -> Iterator[str]:
    documented = _docstrings(model)
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}"
        nested = list(_models(field.annotation))
        if name == "name" and "[" in prefix:
            continue  # which part it is, said by the key itself
        text = documented.get(name, "")
        if not text and nested and nested[0].__doc__ != BaseModel.__doc__:
            text = (nested[0].__doc__ or "").strip().partition("\n\n")[0]
        text = f": {' '.join(text.split())}" if text else ""
        also = f" Also `{verl[key]}`." if key in verl else ""
        yield f"- `{key}` ({_default(field)}{_bounds(field)}){text}{also}"
        for each in nested:
            if each not in seen:
                variant = f"{key}" if len(nested) == 1 else f"{key}[{_name_of(each)}]"
                yield from _keys(each, variant, verl, seen | {each})


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string behind each field, of the class and its ancestors."""
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
    return texts


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models that an annotation names, also within unions and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _models(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType, tuple, list):
        for part in typing.get_args(annotation):
            yield from _models(part)


def _name_of(model: type[BaseModel]) -> str:
    field = model.model_fields.get("name")
    return str(field.default) if field is not None else model.__name__


def _bounds(field: Any) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(part, name)}"
        for part in field.metadata
        for name, sign in signs.items()
        if getattr(part, name, None) is not None
    ]
    return "".join(f", {bound}" for bound in found)


def _default(field: Any) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "section"
    if value is None or value == "":
        return "default none" if value is None else "default empty"
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    return f"default {list(value) if isinstance(value, tuple) else value}"


if __name__ == "__main__":
    main()
