"""`/openapi.json` is valid, has every route of the applications, and is generated from types."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import schemathesis
from aiohttp import web
from jsonschema import Draft202012Validator
from pydantic import SecretStr

from proxy.app import build_app, document_parts
from proxy.config import ListenConfig, ProxyConfig
from proxy.extra import open_extras
from proxy.extras.relay.protocol import PATH as RELAY_PATH
from proxy.extras.view.command import build_view
from proxy.extras.view.extra import Page
from proxy.http.openapi import document
from proxy.serving.forwarding import CONFIRMED_PATH
from proxy.store import open_store
from tests.proxy.conftest import RunningProxy

DOCUMENT = document(document_parts())


def described(made: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, each in made["paths"].items() for method in each}


def served(app: web.Application) -> set[tuple[str, str]]:
    return {
        (route.method, re.sub(r"\{(\w+)[^}]*\}", r"{\1}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and route.method not in ("HEAD", "OPTIONS")
    }


def test_document_has_every_route_of_the_proxy_but_those_of_agents_and_processes(
    checkpoint: Any,
) -> None:
    config = ProxyConfig(
        model=checkpoint, admin_key=SecretStr("k"), relay={"token": "a relay token"}
    )
    found = served(build_app(config))
    agents = {(m, path) for m, path in found if path.startswith("/v1/") or path == "/{path}"}
    workers = {("POST", CONFIRMED_PATH), ("GET", RELAY_PATH)}
    assert found - agents - workers == described(DOCUMENT)


async def test_document_has_every_route_of_the_page_alone(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/sessions.db")
    config = ListenConfig(admin_key=SecretStr("k"))
    assert served(build_view(config, store, None)) == described(
        document(document_parts([Page])[1:])
    )
    await store.close()


def test_document_is_valid_and_every_reference_in_it_resolves() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    text = orjson.dumps(DOCUMENT).decode()
    assert set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', text)) == set(schemas)
    operations = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert len({each["operationId"] for each in operations}) == len(operations)


@pytest.mark.parametrize(
    "change",
    [
        {"paths": {"no slash": {}}},
        {"info": {"title": "without a version"}},
        {"paths": {"/a": {"get": {"responses": {"200": {"content": {"a/b": {}}}}}}}},
        {"components": {"schemas": []}},
    ],
)
def test_validation_refuses_a_wrong_document(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        schemathesis.openapi.from_dict(DOCUMENT | change).validate()


async def test_served_document_is_the_generated_one(proxy: RunningProxy) -> None:
    shown = document(document_parts(open_extras(ProxyConfig())))
    async with proxy.http.get(proxy.url + "/openapi.json") as response:
        assert await response.json() == orjson.loads(orjson.dumps(shown))
