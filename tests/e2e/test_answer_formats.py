"""A format beside tools, on a real vLLM with the quickstart's policy, which calls tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from examples.quickstart.shop import SYSTEM, TOOLS
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.records import Turn
from tests.e2e.running_proxy import Running, running_proxy

pytestmark = pytest.mark.engine
MODEL = Path("examples/quickstart/model")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"total": {"type": "integer", "maximum": 999}, "ok": {"type": "boolean"}},
    "required": ["total", "ok"],
    "additionalProperties": False,
}
ASKED = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "What does this order cost?\nhats: 5\nropes: 6"},
]
ANSWERS = 12


@pytest.fixture(scope="module")
def shop_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    config = VllmConfig(max_sequences=16, nice=1)
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with asyncio.Runner() as runner:
        server = VllmServer(config, MODEL, log=log, dtype="float32", served_model_name="shop")
        runner.run(server.start())
        yield server
        runner.run(server.stop())


@pytest.fixture
async def running(shop_engine: VllmServer, tmp_path: Path) -> AsyncIterator[Running]:
    async with running_proxy(MODEL, shop_engine.url, tmp_path) as running:
        yield running


async def chat(running: Running, **more: Any) -> tuple[list[dict[str, Any]], list[Turn]]:
    """The answers to one request for `ANSWERS`, and their record."""
    session = await running.control.create_session()
    body = {"messages": ASKED, "tools": TOOLS, "n": ANSWERS, "max_tokens": 400, **more}
    headers = {"Authorization": f"Bearer {session.api_key}"}
    target = f"{session.base_url}/chat/completions"
    async with running.http.post(target, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
    _, turns = await running.control.get_turns(session.trial_id)
    return [choice["message"] for choice in answer["choices"]], turns


FORMAT = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}


async def test_calls_are_made_as_without_a_format(running: Running) -> None:
    free, _ = await chat(running)
    bound, _ = await chat(running, response_format=FORMAT)
    called = [sum(bool(said.get("tool_calls")) for said in each) for each in (free, bound)]
    assert called[0] >= ANSWERS - 2
    assert called[1] >= called[0] - 1


@pytest.mark.parametrize("tool", [None, "price"])
async def test_each_required_call_is_made(running: Running, tool: str | None) -> None:
    choice = {"type": "function", "function": {"name": tool}} if tool else "required"
    answers, _ = await chat(running, response_format=FORMAT, tool_choice=choice)
    calls = [said["tool_calls"][0]["function"] for said in answers if said.get("tool_calls")]
    assert len(calls) == ANSWERS
    assert {call["name"] for call in calls} <= ({tool} if tool else {"price", "calculate"})


@pytest.mark.parametrize("offered", [{"tool_choice": "none"}, {"tools": []}], ids=str)
async def test_final_message_is_valid_and_its_log_probabilities_are_those_sampled_from(
    running: Running, offered: dict[str, Any]
) -> None:
    answers, turns = await chat(running, response_format=FORMAT, **offered)
    for said in answers:
        assert not said.get("tool_calls")
        jsonschema.validate(json.loads(said["content"]), SCHEMA)
    assert all(np.isfinite(turn.logprobs).all() for turn in turns)
    # Where the grammar leaves one token, as within a key, its probability is one. How many tokens
    # these are depends on the others, which are sampled.
    assert sum((turn.logprobs > -1e-6).sum() for turn in turns) >= 3
