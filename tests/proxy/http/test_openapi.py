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

from proxy.app import DOCUMENTED, build_app
from proxy.commands.view import build_view
from proxy.config import ListenConfig, ProxyConfig
from proxy.http.openapi import DocumentPart, Operation, document
from proxy.serving.forwarding import CONFIRMED_PATH
from proxy.store import open_store
from tests.proxy.conftest import RunningProxy

DOCUMENT = document(DOCUMENTED)


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
    found = served(build_app(ProxyConfig(model=checkpoint, admin_key=SecretStr("k"))))
    agents = {(m, path) for m, path in found if path.startswith("/v1/") or path == "/{path}"}
    among_processes = {("POST", CONFIRMED_PATH)}
    assert found - agents - among_processes == described(DOCUMENT)
    for part in DOCUMENTED:
        assert {name for _, _, name in part.routes} == set(part.operations)


async def test_document_has_every_route_of_the_page_alone(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/sessions.db")
    config = ListenConfig(admin_key=SecretStr("k"))
    assert served(build_view(config, store, None)) == described(document(DOCUMENTED[1:]))
    await store.close()


def test_route_without_an_operation_is_refused() -> None:
    part = DocumentPart(
        "page", "key", "a key", [("GET", "/view/new", "new")], {"old": Operation("Old")}
    )
    with pytest.raises(KeyError, match="new"):
        document([part])


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
    async with proxy.http.get(proxy.url + "/openapi.json") as response:
        assert await response.json() == orjson.loads(orjson.dumps(DOCUMENT))
