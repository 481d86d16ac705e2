"""What `/openapi.json` has of the control plane: one operation per handler."""

from __future__ import annotations

from proxy.control import quotas as quotas_schema
from proxy.control import schema
from proxy.extras.relay import weights_schema
from proxy.http.openapi import Nothing, Operation
from proxy.records.binary import CONTENT_TYPE

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
        Nothing,
        refusals=(404, 503),
    ),
    "delete": Operation("Removes a session and its record", Nothing, refusals=(404, 409, 503)),
    "engines": Operation("Lists the engines", schema.Engines),
    "add_engine": Operation(
        "Adds an engine", schema.EngineAdded, schema.NewEngine, 201, (400, 409)
    ),
    "remove_engine": Operation("Removes an engine; it gets no new calls", Nothing, refusals=(404,)),
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
    "publish_weights": Operation(
        "Makes every relay worker pull published weights; sampling continues meanwhile",
        Nothing,
        weights_schema.NewWeights,
        refusals=(400, 409),
    ),
    "held_types": Operation(
        "In which types the engines of relay workers hold the weights of a trainer",
        weights_schema.HeldTypes,
        weights_schema.TensorsView,
        refusals=(400, 409),
    ),
    "show_weights": Operation(
        "Which weights each relay worker serves; with `wait_s`, once all have settled",
        weights_schema.WeightsView,
        refusals=(400, 409),
        query={"wait_s": _NUMBER},
    ),
    "release_weights": Operation(
        "Lets other runs publish weights, if they belong to this run", Nothing, refusals=(409,)
    ),
    "set_quota": Operation(
        "Sets what all sessions whose limits name this quota may use together",
        quotas_schema.QuotaView,
        quotas_schema.NewQuota,
        refusals=(400,),
    ),
    "quotas": Operation("Lists the quotas, and how much of each is used", quotas_schema.Quotas),
    "remove_quota": Operation(
        "Removes a quota; sessions that name it can make no more calls",
        Nothing,
        refusals=(400, 404),
    ),
    "release_policy": Operation(
        "Lets other runs publish a policy, if it belongs to this run",
        Nothing,
        refusals=(400,),
    ),
}
"""By the handler's name in `plane.ROUTES`."""
