"""The response to any request to the control plane matches its OpenAPI document."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from proxy.app import document_parts
from proxy.config import ProxyConfig
from proxy.extra import open_extras
from proxy.http.openapi import document
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

SCHEMA = schemathesis.openapi.from_dict(document(document_parts(open_extras(ProxyConfig()))[:1]))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations()]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
HANGS_S = 10.0


@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        *((operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
        *((o, GenerationMode.NEGATIVE) for o in OPERATIONS if o.body or o.query),
    ],
    ids=lambda value: getattr(value, "label", None) or value.name,
)
async def test_response_to_any_request_matches_the_openapi_document(
    operation: Any, mode: GenerationMode, proxy: RunningProxy
) -> None:
    session = await proxy.session()
    await proxy.post(session, "chat/completions", {"messages": [{"role": "user", "content": "."}]})

    def send(case: Case) -> None:
        trial_id = case.path_parameters.get("trial_id")
        if (
            trial_id is not None and len(str(trial_id)) % 2
        ):  # half of the requests name an existing session
            case.path_parameters["trial_id"] = session.trial_id
        if "wait" in case.query:
            case.query["timeout_s"] = 0.01
        case.call_and_validate(
            base_url=proxy.url,
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
            checks=CHECKS,
            timeout=HANGS_S,
        )

    strategy = operation.as_strategy(generation_mode=mode)
    quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    await asyncio.to_thread(quick(given(strategy)(send)))
