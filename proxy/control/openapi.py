"""The control plane's OpenAPI 3.1 document, made of its routes and their models."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from proxy.control import schema
from proxy.record_format import CONTENT_TYPE

_REF = "#/components/schemas/{model}"
_PARAMETER = re.compile(r"\{(\w+)[^}]*\}")


@dataclass(frozen=True, slots=True)
class Operation:
    """One handler of the control plane."""

    summary: str
    answer: type[BaseModel] | None = None
    takes: type[BaseModel] | None = None
    status: int = 200
    refusals: tuple[int, ...] = ()
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    other_types: tuple[str, ...] = ()
    """What is answered instead where `Accept` asks for it (or always, without `answer`)."""
    open_to_all: bool = False


_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_FILTER = {"status": _TEXT, "kind": _TEXT, "id_prefix": _TEXT, "after": _TEXT, "limit": _COUNT}
_FOLLOW = {"wait": {"const": "completed"}, "timeout_s": _NUMBER, "since": _COUNT}
OPERATIONS = {
    "health": Operation("Whether the process lives", schema.Status, open_to_all=True),
    "ready": Operation(
        "Whether calls can be answered", schema.Status, refusals=(503,), open_to_all=True
    ),
    "openapi": Operation("This document", other_types=("application/json",), open_to_all=True),
    "show_metrics": Operation("For Prometheus, of all processes", other_types=("text/plain",)),
    "list": Operation("Sessions in order", schema.SessionList, query=_FILTER, refusals=(400,)),
    "create": Operation("A new session", schema.SessionCreated, schema.NewSession, 201, (400, 409)),
    "show": Operation("Turns, forks, rewards", schema.SessionRecord, refusals=(404,)),
    "trajectories": Operation(
        "Every path through the token tree",
        schema.SessionTrajectories,
        refusals=(404,),
        other_types=(CONTENT_TYPE,),
    ),
    "events": Operation(
        "What happened and what happens; with `wait`, whether the session has ended",
        schema.Events,
        refusals=(400, 404),
        query=_FOLLOW,
        other_types=("text/event-stream",),
    ),
    "reward": Operation(
        "A reward, once per key", schema.Added, schema.NewReward, refusals=(400, 404)
    ),
    "complete": Operation("Later calls get 409", schema.Nothing, refusals=(404,)),
    "delete": Operation("The session and its record", schema.Nothing, refusals=(404,)),
    "engines": Operation("The replicas", schema.Engines),
    "add_engine": Operation(
        "One more replica", schema.EngineAdded, schema.NewEngine, 201, (400, 409)
    ),
    "remove_engine": Operation("It gets no new call", schema.Nothing, refusals=(404,)),
    "pause": Operation("Calls that have not begun wait", schema.Paused),
    "resume": Operation("They go on", schema.Paused),
    "set_version": Operation(
        "The weights' version", schema.Version, schema.Version, refusals=(400,)
    ),
}
"""By handler, as in `control_plane.ROUTES`."""


def document(routes: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
    """`routes`: method, path and handler of each."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, name in routes:
        plain = _PARAMETER.sub(r"{\1}", path)
        paths.setdefault(plain, {})[method.lower()] = _operation(name, method, plain)
    models: set[type[BaseModel]] = {schema.Error}
    for operation in OPERATIONS.values():
        models.update(m for m in (operation.answer, operation.takes) if m is not None)
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(m, "validation") for m in ordered], ref_template=_REF)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentic-proxy, control plane", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"admin_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(name: str, method: str, path: str) -> dict[str, Any]:
    operation = OPERATIONS[name]
    names = _PARAMETER.findall(path)
    parameters = [{"name": n, "in": "path", "required": True, "schema": _TEXT} for n in names] + [
        {"name": n, "in": "query", "schema": s} for n, s in operation.query.items()
    ]
    content: dict[str, Any] = {kind: {} for kind in operation.other_types}
    if operation.answer is not None:
        content["application/json"] = _content(operation.answer)
    refusals = operation.refusals if operation.open_to_all else (*operation.refusals, 401)
    described: dict[str, Any] = {
        "operationId": "_".join([name, *(names if name == "create" else [])]),
        "summary": operation.summary,
        "parameters": parameters,
        "security": [] if operation.open_to_all else [{"admin_key": []}],
        "responses": {
            str(operation.status): {"description": operation.summary, "content": content},
            **{str(status): _refusal(status) for status in sorted(refusals)},
        },
    }
    if operation.takes is not None:
        described["requestBody"] = {"content": {"application/json": _content(operation.takes)}}
    return described


def _content(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model.__name__)}}


def _refusal(status: int) -> dict[str, Any]:
    return {
        "description": f"refused: {status}",
        "content": {"application/json": _content(schema.Error)},
    }
