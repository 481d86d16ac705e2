"""What `/openapi.json` has of the page: one operation per handler."""

from __future__ import annotations

from typing import Any

from proxy.extras.rules.rules import RuleConfig
from proxy.extras.view.answers import (
    ForkJson,
    ForksPage,
    HeadsPage,
    HitsPage,
    NewsJson,
    RuleName,
    RulesAnswer,
    Secret,
    SessionJson,
    SessionsPage,
    StateAnswer,
    StateJson,
    TextPiece,
    TokensPage,
    TurnsAnswer,
)
from proxy.extras.view.publishing import (
    FileEnd,
    PublishedConfig,
    PublishedPhases,
    PublishedSteps,
    PublishedSummary,
    PublishedTrials,
    StepTokens,
)
from proxy.extras.view.run_answers import (
    FilePiece,
    MetricsPage,
    NowJson,
    RunJson,
    StepTrials,
    TraceFile,
    TrialOfRun,
    TrialsPage,
)
from proxy.http.openapi import Nothing, Operation
from proxy.records import ForkCause, SessionKind, SessionStatus

_Parameter = dict[str, Any]
_TEXT: _Parameter = {"type": "string"}
_NUMBER: _Parameter = {"type": "number"}
_COUNT: _Parameter = {"type": "integer", "minimum": 0}
_SET: _Parameter = {"type": "string", "description": "any text: yes; missing or empty: no"}
_SESSION = {
    "session": _TEXT,
    "run": {"type": "string", "description": "the run whose sessions it is one of, as in `state`"},
}
_TURN = {**_SESSION, "turn": _COUNT}
_RUN = {"run": _TEXT}
_AT = {"at": {**_COUNT, "description": "size of the file, from the answer to the request before"}}
_PUBLISHING = (400, 403, 404, 408, 413, 415, 503)
_APPENDING = (*_PUBLISHING, 409)


def _limit(most: int) -> _Parameter:
    return {"type": "integer", "minimum": 1, "maximum": most}


OPERATIONS = {
    "page": Operation("The page", other_types=("text/html",), open_to_all=True),
    "static": Operation(
        "A file of the page",
        refusals=(404,),
        other_types=("text/javascript", "text/css", "image/svg+xml"),
        open_to_all=True,
    ),
    "log_in": Operation(
        "Exchanges a secret for a cookie of this browser",
        Nothing,
        Secret,
        refusals=(400, 401, 503),
        open_to_all=True,
    ),
    "log_out": Operation("Ends the cookie", Nothing, refusals=(503,)),
    "live": Operation(
        "What happens from now on, or after the position `after` (also `Last-Event-ID`), which each"
        " event has as its id",
        query={"after": _TEXT},
        refusals=(429,),
        events={"message": NewsJson, "state": StateJson},
    ),
    "state": Operation("The engines, and the runs that are shown", StateAnswer),
    "sessions": Operation(
        "Sessions, the newest first",
        SessionsPage,
        query={
            "status": {"enum": ["", *SessionStatus]},
            "kind": {"enum": ["", *SessionKind]},
            "prefix": _TEXT,
            "marked": _TEXT,
            "before": _TEXT,
            "limit": _limit(200),
        },
        refusals=(400, 503),
    ),
    "session": Operation(
        "One session", SessionJson, query=_SESSION, needs=("session",), refusals=(404, 503)
    ),
    "heads": Operation(
        "The turns of a session without tokens and texts",
        HeadsPage,
        query={**_SESSION, "since": _COUNT},
        needs=("session",),
        refusals=(400, 503),
    ),
    "turns": Operation(
        "The messages of turns",
        TurnsAnswer,
        query={**_SESSION, "turns": {"type": "string", "pattern": r"^\d+(,\d+)*$"}},
        needs=("session", "turns"),
        refusals=(400, 503),
    ),
    "text": Operation(
        "A piece of a long text, which begins at the character `from`",
        TextPiece,
        query={**_TURN, "place": _TEXT, "from": _COUNT},
        needs=("session", "turn", "place"),
        refusals=(400, 404, 503),
    ),
    "fork": Operation(
        "Why a turn forks: what was sent against what was recorded",
        ForkJson,
        query=_TURN,
        needs=("session", "turn"),
        refusals=(400, 404, 503),
    ),
    "forks": Operation(
        "The turns of all sessions that fork, for a cause or any, the newest first",
        ForksPage,
        query={"cause": {"enum": ["", *ForkCause]}, "before": _NUMBER, "limit": _limit(200)},
        refusals=(400, 503),
    ),
    "tokens": Operation(
        "The tokens of a turn's path: what the model saw and wrote",
        TokensPage,
        query={**_TURN, "start": _COUNT, "count": _limit(4000)},
        needs=("session", "turn"),
        refusals=(400, 404, 503),
    ),
    "search": Operation(
        "The turns that match, from the newest to the oldest, of those that one request reads",
        HitsPage,
        query={
            "text": _TEXT,
            "regex": _TEXT,
            "tool": _TEXT,
            "cause": {"enum": ["", *ForkCause]},
            "edits_tests": _SET,
            "answers_only": _SET,
            "before": _COUNT,
        },
        refusals=(400, 503),
    ),
    "rules": Operation("The search rules", RulesAnswer, refusals=(503,)),
    "rules/save": Operation(
        "Saves a rule that marks sessions; for the administrator",
        Nothing,
        RuleConfig,
        refusals=(400, 403, 409, 503),
    ),
    "rules/remove": Operation(
        "Removes a saved rule; for the administrator",
        Nothing,
        RuleName,
        refusals=(400, 403, 404, 503),
    ),
    "run": Operation("A run at a glance", RunJson, query=_RUN, needs=("run",), refusals=(404,)),
    "run/metrics": Operation(
        "The metrics of a run, read on from the byte `from`",
        MetricsPage,
        query={**_RUN, "from": _COUNT},
        needs=("run",),
        refusals=(400, 404),
    ),
    "run/trials": Operation(
        "The trials of a run, the latest first",
        TrialsPage,
        query={
            **_RUN,
            **dict.fromkeys(("kind", "status", "source", "task", "text", "marked"), _TEXT),
            **dict.fromkeys(("min_reward", "max_reward"), _NUMBER),
            "min_tokens": _COUNT,
            "errors": _SET,
            "before": _COUNT,
            "limit": _limit(200),
        },
        needs=("run",),
        refusals=(400, 404, 503),
    ),
    "run/step": Operation(
        "The trials of a step",
        StepTrials,
        query={**_RUN, "step": _COUNT},
        needs=("run",),
        refusals=(400, 404),
    ),
    "run/trial": Operation(
        "What a run knows of a session: how its trial ended, its log, and what its verifier wrote",
        TrialOfRun,
        query=_SESSION,
        needs=("session",),
        refusals=(404,),
    ),
    "run/file": Operation(
        "A piece of one of these files, which ends at the byte `before`",
        FilePiece,
        query={**_SESSION, "name": _TEXT, "before": _COUNT},
        needs=("session", "name", "before"),
        refusals=(400, 404),
    ),
    "run/trace": Operation(
        "The run as a file for Perfetto", TraceFile, query=_RUN, needs=("run",), refusals=(404,)
    ),
    "publish": Operation(
        "Begins the run of another trainer, or continues it; for the administrator",
        Nothing,
        PublishedConfig,
        refusals=_APPENDING,
    ),
    "publish/steps": Operation(
        "Appends metrics of steps and evaluations",
        FileEnd,
        PublishedSteps,
        query=_AT,
        refusals=_APPENDING,
    ),
    "publish/trials": Operation(
        "Appends finished trials, in steps that do not decrease",
        FileEnd,
        PublishedTrials,
        query=_AT,
        refusals=_APPENDING,
    ),
    "publish/phases": Operation(
        "Appends phases of the trainer that have ended",
        FileEnd,
        PublishedPhases,
        query=_AT,
        refusals=_APPENDING,
    ),
    "publish/tokens": Operation(
        "Writes the trained tokens of a step, in place of those that it has",
        Nothing,
        StepTokens,
        refusals=_PUBLISHING,
    ),
    "publish/summary": Operation(
        "Replaces the status and the evaluations of the run",
        Nothing,
        PublishedSummary,
        refusals=_PUBLISHING,
    ),
    "publish/now": Operation(
        "Replaces what the run does at this moment", Nothing, NowJson, refusals=_PUBLISHING
    ),
    "publish/remove": Operation("Removes a published run", Nothing, refusals=(403, 404, 503)),
}
"""By the handler's name in `api.ROUTES`."""
