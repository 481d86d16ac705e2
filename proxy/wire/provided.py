"""The tools of a provider that the proxy runs itself, by backends of the user: which entries of a
request are such tools, and the forms of their results in each dialect.

Invariant: each tool has its own module; this one only chooses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from proxy.conversation.messages import Message, ToolCall, arguments_object
from proxy.rendering.deltas import ResultDelta
from proxy.wire import code_execution as code
from proxy.wire import web_search as web
from proxy.wire.fields import Fields

JsonObject = dict[str, Any]
UNNAMED = "unnamed_"
"""Begins the id of a call in a history whose items have no ids."""


class ProviderTool(NamedTuple):
    """One of the tools."""

    is_kind: Callable[[Any], bool]
    """Whether a tool type is this tool's."""
    functions: Callable[[str], list[JsonObject]]
    """What the model is offered for a tool type."""


TOOLS = {
    web.WEB_SEARCH: ProviderTool(web.is_web_search, web.search_functions),
    code.CODE: ProviderTool(code.is_code_execution, code.code_functions),
}
"""By the name of the setting in `tools`, which is that of the tool's first function."""


class PastCall(NamedTuple):
    """A call of such a tool in a history of Responses, whose items may lack the results."""

    result: Message
    """Its text is filled from the record where it is empty."""
    call: ToolCall
    item: code.CodeItem | None = None
    """Of code."""

    def text_if_lost(self) -> str:
        """What the model sees if the result is not in the record."""
        return web.NOT_RECORDED if self.item is None else self.item.text()


def offered_functions(kind: str, backends: frozenset[str]) -> list[JsonObject]:
    """The functions for the model; none for another tool, or without a backend."""
    named = name_of(kind)
    return TOOLS[named].functions(kind) if named in backends else []


def name_of(kind: Any) -> str:
    """The setting of a tool type; empty for another tool."""
    return next((name for name, tool in TOOLS.items() if tool.is_kind(kind)), "")


def provider_tools(tools: list[Any]) -> dict[str, JsonObject]:
    """By the name of the function, the entries of the tools whose calls the proxy answers itself,
    unless a tool of the agent has that name. `tools` are objects, or what a client sent instead."""
    found: dict[str, JsonObject] = {}
    for tool in tools:
        if isinstance(tool, dict) and (named := name_of(tool.get("type"))):
            for function in TOOLS[named].functions(tool["type"]):
                found.setdefault(function["name"], tool)
    own = [t.get("name") for t in tools if isinstance(t, dict) and not name_of(t.get("type"))]
    return {name: tool for name, tool in found.items() if name not in own}


def is_error(text: str) -> bool:
    """Whether a result is an error of one of the tools."""
    return web.is_error(text) or code.is_error(text)


def input_of(call: ToolCall) -> str:
    """The query or the code of a call; empty if it has none."""
    if call.name != web.WEB_SEARCH:
        return code.code_of(call)
    query = arguments_object(call).get("query")
    return query if isinstance(query, str) else ""


# ---------------------------------------------------------------------------- Messages

RESULT_BLOCKS = {"web_search_tool_result": web.WEB_SEARCH, **code.RESULT_BLOCKS}
"""Types of blocks with results, and the functions that were called."""


def result_block(result: ResultDelta) -> JsonObject:
    """The block of a result."""
    is_search = result.call.name == web.WEB_SEARCH
    return web.result_block(result) if is_search else code.result_block(result)


def block_result(block: Fields) -> str:
    """The text of a result that comes back."""
    is_search = RESULT_BLOCKS[block.text("type")] == web.WEB_SEARCH
    return web.block_result(block) if is_search else code.block_result(block)


# --------------------------------------------------------------------------- Responses

CALL_ITEMS = {"web_search_call": web.WEB_SEARCH, "code_interpreter_call": code.CODE}
"""Types of items with calls, and the functions that were called."""


def result_item(
    result: ResultDelta, turn: int, tools: Mapping[str, JsonObject], *, with_outputs: bool
) -> JsonObject:
    """The item of a call whose result is known. `tools`: see `provider_tools`."""
    name = result.call.name
    if name == web.WEB_SEARCH:
        return web.search_item(result, turn)
    return code.code_item(result, turn, tools[name], with_outputs=with_outputs)


def past_call(item: Fields, call_id: str) -> PastCall:
    """The call of an item that comes back. `call_id` is for a client that sends no ids of items."""
    if item.get("type") == "web_search_call":
        call, text = web.item_search(item, call_id)
        return PastCall(Message("tool", text or "", tool_call_id=call.id), call)
    past = code.item_code(item, call_id)
    return PastCall(Message("tool", "", tool_call_id=past.call.id), past.call, past)
