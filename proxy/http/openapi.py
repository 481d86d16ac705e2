"""Makes the OpenAPI 3.1 document from the routes and the types of what they take and answer.

Invariant: a route without an `Operation` cannot be described, so that none is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, TypeAdapter

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)[^}]*\}")
_TEXT = {"type": "string"}

Route: TypeAlias = tuple[str, str, str]
"""Method, path, and name of the handler."""


CLOSED = ConfigDict(extra="forbid")
"""Of a typed dictionary: what it describes has no key that the schema lacks."""
OPEN = ConfigDict(extra="allow")


class Schema(BaseModel):
    """Base class: unknown keys and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Nothing(Schema):
    """An empty JSON object."""


class ErrorDetail(Schema):
    """What happened and what to do."""

    message: str


class ErrorBody(Schema):
    """Body of every answer with a status of 400 or above."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Operation:
    """One handler. Bodies are pydantic models, or typed dictionaries that the handler returns."""

    summary: str
    answer: type | None = None
    takes: type | None = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    """The parameters of `query` that must be given."""
    other_types: tuple[str, ...] = ()
    """Content types that are sent if `Accept` names them (always, if there is no `answer`)."""
    events: Mapping[str, type] = field(default_factory=dict)
    """What the data of server-sent events are, by the name of the event."""
    open_to_all: bool = False


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """Routes that ask for the same key. `key` is a name in `securitySchemes`."""

    title: str
    key: str
    about_key: str
    routes: Sequence[Route]
    operations: Mapping[str, Operation]
    """By the handler's name."""


def document(parts: Sequence[DocumentPart]) -> dict[str, Any]:
    """Raises KeyError for a route without an operation."""
    types = {ErrorBody} | {
        kind
        for part in parts
        for operation in part.operations.values()
        for kind in (operation.answer, operation.takes, *operation.events.values())
        if kind is not None
    }
    adapters: list[tuple[str, Any, TypeAdapter[Any]]] = [
        (kind.__name__, "validation", TypeAdapter(kind))
        for kind in sorted(types, key=lambda kind: kind.__name__)
    ]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for part in parts:
        for method, path, name in part.routes:
            plain = _PARAMETER.sub(r"{\1}", path)
            paths.setdefault(plain, {})[method.lower()] = _operation(part, name, plain)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentic-proxy", "version": "1"},
        "tags": [{"name": part.title} for part in parts],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                part.key: {"type": "http", "scheme": "bearer", "description": part.about_key}
                for part in parts
            },
        },
    }


def _operation(part: DocumentPart, name: str, path: str) -> dict[str, Any]:
    operation = part.operations[name]
    names = _PARAMETER.findall(path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": _TEXT} for n in names] + [
        {"name": n, "in": "query", "required": n in operation.needs, "schema": s}
        for n, s in operation.query.items()
    ]
    content: dict[str, Any] = {kind: {} for kind in operation.other_types}
    if operation.answer is not None:
        content["application/json"] = _content(operation.answer)
    if operation.events:
        data = {event: _content(kind)["schema"] for event, kind in operation.events.items()}
        content["text/event-stream"] = {"schema": _TEXT, "x-event-data": data}
    refusals = operation.refusals if operation.open_to_all else (*operation.refusals, 401)
    described: dict[str, Any] = {
        "operationId": "_".join([*name.split("/"), *(names if name == "create" else [])]),
        "summary": operation.summary,
        "tags": [part.title],
        "parameters": parameters,
        "security": [] if operation.open_to_all else [{part.key: []}],
        "responses": {
            str(operation.status): {"description": operation.summary, "content": content},
            **{str(status): _refusal(status) for status in sorted(refusals)},
        },
    }
    if operation.takes is not None:
        described["requestBody"] = {"content": {"application/json": _content(operation.takes)}}
    return described


def _content(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=kind.__name__)}}


def _refusal(status: int) -> dict[str, Any]:
    return {
        "description": f"refused: {status}",
        "content": {"application/json": _content(ErrorBody)},
    }
