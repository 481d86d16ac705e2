"""The control plane's OpenAPI 3.1 document, generated from its routes and their models."""

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
    """Content types that are sent if `Accept` names them (always, if there is no `answer`)."""
    open_to_all: bool = False


_TEXT, _NUMBER, _COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_FILTER = {
    "status": _TEXT,
    "kind": _TEXT,
    "id_prefix": _TEXT,
    "marked": _TEXT,
    "after": _TEXT,
    "limit": _COUNT,
}
_FOLLOW = {"wait": {"const": "completed"}, "timeout_s": _NUMBER, "since": _COUNT}
OPERATIONS = {
    "health": Operation("Whether the process lives", schema.ProcessStatus, open_to_all=True),
    "ready": Operation(
        "Whether calls can be answered", schema.ProcessStatus, refusals=(503,), open_to_all=True
    ),
    "openapi": Operation("This document", other_types=("application/json",), open_to_all=True),
    "show_metrics": Operation("Prometheus metrics of all processes", other_types=("text/plain",)),
    "list": Operation(
        "Lists sessions in order of their ids", schema.SessionList, query=_FILTER, refusals=(400,)
    ),
    "create": Operation(
        "Creates a session, or a branch of one",
        schema.SessionCreated,
        schema.NewSession,
        201,
        (400, 404, 409),
    ),
    "show": Operation(
        "A session with its turns, forks and rewards", schema.SessionRecord, refusals=(404,)
    ),
    "trajectories": Operation(
        "Every path through the token tree",
        schema.SessionTrajectories,
        refusals=(404,),
        other_types=(CONTENT_TYPE,),
    ),
    "events": Operation(
        "Past events or a stream of new ones; with `wait`, whether the session has ended",
        schema.Events,
        refusals=(400, 404),
        query=_FOLLOW,
        other_types=("text/event-stream",),
    ),
    "reward": Operation(
        "Adds a reward, once per key", schema.Added, schema.NewReward, refusals=(400, 404)
    ),
    "complete": Operation(
        "Ends a session: later calls get 409, calls in flight are cut",
        schema.Nothing,
        refusals=(404, 503),
    ),
    "delete": Operation(
        "Removes a session and its record", schema.Nothing, refusals=(404, 409, 503)
    ),
    "engines": Operation("Lists the engines", schema.Engines),
    "add_engine": Operation(
        "Adds an engine", schema.EngineAdded, schema.NewEngine, 201, (400, 409)
    ),
    "remove_engine": Operation(
        "Removes an engine; it gets no new calls", schema.Nothing, refusals=(404,)
    ),
    "pause": Operation("Makes calls that have not begun wait", schema.Paused),
    "resume": Operation("Lets waiting calls continue", schema.Paused),
    "set_version": Operation(
        "Sets the version of the weights", schema.Version, schema.Version, refusals=(400,)
    ),
    "publish_policy": Operation(
        "Makes an adapter the current version of a policy; running calls continue with it",
        schema.PolicyView,
        schema.PolicyVersion,
        refusals=(400, 409),
    ),
}
"""By the handler's name in `plane.ROUTES`."""


def document(routes: tuple[tuple[str, str, str], ...]) -> dict[str, Any]:
    """`routes`: (method, path, name of the handler)"""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, name in routes:
        plain = _PARAMETER.sub(r"{\1}", path)
        paths.setdefault(plain, {})[method.lower()] = _operation(name, method, plain)
    models: set[type[BaseModel]] = {schema.ErrorBody}
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
        "content": {"application/json": _content(schema.ErrorBody)},
    }
