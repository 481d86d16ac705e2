"""Tools that an agent offers only once they are found."""

from __future__ import annotations

import json
from typing import Any

from proxy.conversation import Conversation, Message
from tests.e2e.agents.census.agents import agents
from tests.e2e.agents.census.policy import offered_tools


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def names(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_tools_of_a_search_are_offered_from_then_on() -> None:
    found = {"name": "Monitor", "description": "It\nwaits.", "input_schema": {"type": "object"}}
    result = Message("tool", json.dumps(found) + "\n" + json.dumps({**found, "name": "Bash"}))
    asked = [Message("user", "Part 1: go."), Message("assistant"), Message("tool", '{"name":')]
    tools = [function("Bash"), function("ToolSearch")]
    assert names(offered_tools(Conversation(asked, tools))) == ["Bash", "ToolSearch"]
    searched = offered_tools(Conversation([*asked, result], tools))
    assert names(searched) == ["Bash", "ToolSearch", "Monitor"]
    assert searched[2] == function("Monitor")


def test_claude_code_searches_first_where_it_has_a_search() -> None:
    claude = agents()["claude_code"]
    first = claude.plan([function("ToolSearch"), function("Bash")], "/work", 1)[0].calls
    assert [name for name, _ in first] == ["ToolSearch"]
    first = claude.plan([function("Bash")], "/work", 1)[0].calls
    assert [name for name, _ in first] == ["Write"]
