"""Makes the OpenAPI 3.1 document from the declared routes (`proxy.http.route`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from proxy.http.route import Route, Who

_REF = "#/components/schemas/{model}"
_TEXT = {"type": "string"}


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
class DocumentPart:
    """Routes that ask for the same key. `key` is a name in `securitySchemes`."""

    title: str
    key: str
    about_key: str
    routes: Sequence[Route]


def document(parts: Sequence[DocumentPart]) -> dict[str, Any]:
    """The document of these routes."""
    types = {ErrorBody} | {
        kind
        for part in parts
        for route in part.routes
        for kind in (route.answer, route.takes, *route.events.values())
        if kind is not None
    }
    adapters: list[tuple[str, Any, TypeAdapter[Any]]] = [
        (kind.__name__, "validation", TypeAdapter(kind))
        for kind in sorted(types, key=lambda kind: kind.__name__)
    ]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for part in parts:
        for route in filter(attrgetter("documented"), part.routes):
            paths.setdefault(route.plain_path, {})[route.method.lower()] = _operation(part, route)
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


def _operation(part: DocumentPart, route: Route) -> dict[str, Any]:
    parameters = [
        {"name": n, "in": "path", "required": True, "schema": _TEXT} for n in route.parameters
    ] + [
        {"name": n, "in": "query", "required": n in route.needs, "schema": s}
        for n, s in route.query.items()
    ]
    content: dict[str, Any] = {kind: {} for kind in route.other_types}
    if route.answer is not None:
        content["application/json"] = _content(route.answer)
    if route.events:
        data = {event: _content(kind)["schema"] for event, kind in route.events.items()}
        content["text/event-stream"] = {"schema": _TEXT, "x-event-data": data}
    is_open = route.who is Who.ANYONE
    refusals = route.refusals if is_open else (*route.refusals, 401)
    described: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "tags": [part.title],
        "parameters": parameters,
        "security": [] if is_open else [{part.key: []}],
        "responses": {
            str(route.status): {"description": route.summary, "content": content},
            **{str(status): _refusal(status) for status in sorted(refusals)},
        },
    }
    if route.takes is not None:
        described["requestBody"] = {"content": {"application/json": _content(route.takes)}}
    return described


def _content(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=kind.__name__)}}


def _refusal(status: int) -> dict[str, Any]:
    return {
        "description": f"refused: {status}",
        "content": {"application/json": _content(ErrorBody)},
    }
