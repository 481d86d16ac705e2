"""Web search, the one tool of a provider that the proxy can run itself, if it has a backend for it.

    tools: {web_search: my_package.search:search}

The model sees a function `web_search`. The agent gets the forms of its dialect: `server_tool_use`
and `web_search_tool_result` (Messages), `web_search_call` (Responses). Invariant: the text that the
model sees for a result can be read from what the agent sends back (Messages), or is looked up in
the record (Responses, whose items have no results), so that the next request extends the path.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from proxy.conversation.messages import ToolCall, arguments_object
from proxy.rendering.deltas import ResultDelta
from proxy.wire.fields import Fields

JsonObject = dict[str, Any]
WEB_SEARCH = "web_search"
"""The name of the function, and of the setting in `tools`."""
UNAVAILABLE = "web_search is unavailable"
_ERRORS = {
    UNAVAILABLE: "unavailable",
    "web_search needs a query": "invalid_tool_input",
    "web_search cannot be called again in this answer": "max_uses_exceeded",
}
"""Texts that the model sees for an error: Anthropic's codes."""
_, NO_QUERY, TOO_MANY = _ERRORS
NOT_RECORDED = "the results of this search are not in the record"
_MARK = "agentic-proxy:"
"""Begins the `encrypted_content` of our own results, which is their text."""
_FUNCTION: JsonObject = {
    "name": WEB_SEARCH,
    "description": "Searches the web. Returns titles, addresses and texts of pages.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for."}},
        "required": ["query"],
    },
}


def is_web_search(kind: Any) -> bool:
    """Example: `web_search_20250305`, `web_search_preview`"""
    return isinstance(kind, str) and kind.startswith(WEB_SEARCH)


def search_functions(kind: str) -> list[JsonObject]:
    """The functions for the model of a tool of this kind."""
    return [{**_FUNCTION}]


def results_text(results: list[dict[str, str]]) -> str:
    """What the model sees of results, each of which has `title`, `url` and `text`."""
    return orjson.dumps(results).decode()


def is_error(text: str) -> bool:
    return text in _ERRORS


# ---------------------------------------------------------------------------- Messages


def result_block(result: ResultDelta) -> JsonObject:
    """The block of a result."""
    head = {"type": "web_search_tool_result", "tool_use_id": result.call.id}
    code = _ERRORS.get(result.text)
    if code is not None:
        return {**head, "content": {"type": "web_search_tool_result_error", "error_code": code}}
    found = [
        {
            "type": "web_search_result",
            "title": each["title"],
            "url": each["url"],
            "encrypted_content": _MARK + each["text"],
            "page_age": None,
        }
        for each in orjson.loads(result.text)
    ]
    return {**head, "content": found}


def block_result(block: Fields) -> str:
    """The text of a result that comes back. What another provider has encrypted is left out."""
    if not isinstance(block.get("content"), list):
        code = [each.get("error_code") for each in block.quoted_objects("content")]
        return next((text for text, known in _ERRORS.items() if known in code), UNAVAILABLE)
    found = []
    for each in block.quoted_objects("content"):
        content = each.quoted("encrypted_content")
        text = content[len(_MARK) :] if content.startswith(_MARK) else ""
        found.append({"title": each.quoted("title"), "url": each.quoted("url"), "text": text})
    return results_text(found)


# --------------------------------------------------------------------------- Responses


def search_item(result: ResultDelta, turn: int) -> JsonObject:
    """The item of a call whose result is known."""
    query = arguments_object(result.call).get("query")
    return {
        "id": f"ws_{turn}_{result.call.id}",
        "type": "web_search_call",
        "status": "failed" if is_error(result.text) else "completed",
        "action": {"type": "search", "query": query if isinstance(query, str) else ""},
    }


def item_search(item: Fields, call_id: str) -> tuple[ToolCall, str | None]:
    """The call of an item that comes back, and its result; None if that is in the record.
    `call_id` is for a client that sends no ids of items."""
    own = _ITEM_ID.fullmatch(item.quoted("id"))
    query = [action.get("query") for action in item.quoted_objects("action")]
    arguments = orjson.dumps({"query": next(iter(query), None)}).decode()
    call = ToolCall(own["call_id"] if own else call_id, WEB_SEARCH, arguments)
    return call, UNAVAILABLE if item.get("status") == "failed" else None


_ITEM_ID = re.compile(r"ws_[0-9]{1,9}_(?P<call_id>.+)")
