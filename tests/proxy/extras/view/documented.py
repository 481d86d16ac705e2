"""What `/openapi.json` says of an answer, and whether an answer is so."""

from __future__ import annotations

from typing import Any

import orjson
from jsonschema import Draft202012Validator

from proxy.app import document_parts
from proxy.http.openapi import document

DOCUMENT = orjson.loads(orjson.dumps(document(document_parts()[1:])))


def check_answer(path: str, method: str, status: int, body: bytes) -> None:
    content = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]
    check(orjson.loads(body), content["application/json"]["schema"])


def check(value: Any, schema: dict[str, Any]) -> None:
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)
