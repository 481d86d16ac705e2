"""The parameters of the page's requests, as its routes declare them for the OpenAPI document.

`query` reads them.
"""

from __future__ import annotations

from typing import Any

Parameter = dict[str, Any]
TEXT: Parameter = {"type": "string"}
NUMBER: Parameter = {"type": "number"}
COUNT: Parameter = {"type": "integer", "minimum": 0}
SET: Parameter = {"type": "string", "description": "any text: yes; missing or empty: no"}
SESSION = {
    "session": TEXT,
    "run": {"type": "string", "description": "the run whose sessions it is one of, as in `state`"},
}
TURN = {**SESSION, "turn": COUNT}
RUN = {"run": TEXT}
AT = {"at": {**COUNT, "description": "size of the file, from the answer to the request before"}}
PUBLISHING = (400, 403, 404, 408, 413, 415, 503)
APPENDING = (*PUBLISHING, 409)


def up_to(most: int) -> Parameter:
    return {"type": "integer", "minimum": 1, "maximum": most}
