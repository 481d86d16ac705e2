"""Calls that wait for room in the engine's KV cache (`proxy.extras.schedule`), through the
whole proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from proxy.client import SessionHandle
from proxy.records import Turn, TurnStatus
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

CHAT = "chat/completions"
CACHE_TOKENS = 100
"""Less than two of the calls here, with their prompts and the expected 256 tokens of an answer."""
POLL_S, POLLS = 0.1, 600
KEEP_ALIVE = b": keep-alive\n"


def chat(text: str = "Hi.", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Full:
    """A proxy whose engine's cache is full: a call of `holder` is sampled and stands still."""

    proxy: RunningProxy
    holder: SessionHandle
    held: asyncio.Task[Any]

    async def free(self) -> None:
        await self.proxy.control.complete(self.holder.trial_id)
        await self.held

    async def until_paused(self) -> None:
        """Returns when a call waits for room."""
        for _ in range(POLLS):
            if await self.metric("agentic_proxy_paused_calls"):
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"no call was paused within {POLLS * POLL_S:g} s")

    async def metric(self, name: str) -> float:
        async with self.proxy.http.get(
            f"{self.proxy.url}/metrics", headers={"Authorization": f"Bearer {ADMIN_KEY}"}
        ) as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + " "))


async def filled(
    start_proxy: StartProxy,
    engine: ScriptedEngine,
    limits: dict[str, Any] | None = None,
    *,
    off: bool = False,
    **scheduling: Any,
) -> Full:
    limits = {"keep_alive_s": 0.02, **(limits or {})}
    section = None if off else scheduling
    proxy = await start_proxy(engine=engine, scheduling=section, limits=limits)
    while (await proxy.control.engines())[0]["cache_tokens"] is None:
        await engine.checked.wait()
    engine.faults = [Fault("stall")]
    holder = await proxy.session()
    held = asyncio.create_task(proxy.post(holder, CHAT, chat("I hold the cache."), 3600))
    await engine.called.wait()
    return Full(proxy, holder, held)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda _: [], cache_tokens=CACHE_TOKENS) as engine:
        yield engine


def streamed(full: Full, session: SessionHandle) -> Any:
    return full.proxy.http.post(
        f"{session.base_url}/{CHAT}",
        data=orjson.dumps(chat(stream=True)),
        headers={"Authorization": f"Bearer {session.api_key}"},
    )


async def until_keep_alive(response: Any) -> None:
    async for line in response.content:
        if line == KEEP_ALIVE:
            return


async def turns_of(full: Full, session: SessionHandle) -> list[Turn]:
    return (await full.proxy.record(session))[1]


async def test_paused_stream_gets_keep_alives_and_goes_on_when_the_cache_has_room(
    start_proxy: StartProxy, engine: ScriptedEngine
) -> None:
    full = await filled(start_proxy, engine)
    session = await full.proxy.session()
    async with streamed(full, session) as response:
        lines = [await response.content.readline() for _ in range(6)]
        assert lines.count(KEEP_ALIVE) >= 2
        assert len(engine.calls) == 1
        assert await full.metric("agentic_proxy_paused_calls") == 1
        await full.free()
        assert b"[DONE]" in await response.read()
    (turn,) = await turns_of(full, session)
    sampled = engine.calls[-1]
    assert turn.status is TurnStatus.DONE
    assert turn.prompt_ids.tolist() == sampled.prompt_ids
    assert turn.sampled_ids.tolist() == sampled.answer_ids
    assert await full.metric("agentic_proxy_paused_calls") == 0


async def test_client_that_leaves_while_its_call_is_paused_leaves_a_cut_turn_and_no_wait(
    start_proxy: StartProxy, engine: ScriptedEngine
) -> None:
    full = await filled(start_proxy, engine)
    session = await full.proxy.session()
    async with streamed(full, session) as response:
        await until_keep_alive(response)
        response.close()
    await full.proxy.control.complete(session.trial_id)
    assert await full.metric("agentic_proxy_paused_calls") == 0
    await full.free()
    assert [turn.status for turn in await turns_of(full, session)] == [TurnStatus.CUT]
    assert len(engine.calls) == 1
    other = await full.proxy.session()
    assert (await full.proxy.post(other, CHAT, chat()))[0] == 200


@pytest.mark.parametrize(
    ("scheduling", "headers"),
    [({"max_wait_s": 0.1}, {}), ({}, {"x-stainless-timeout": "0.2"}), ({"off": True}, {})],
    ids=["max-wait", "client-timeout", "off"],
)
async def test_call_goes_to_the_engine_when_it_may_not_wait_longer(
    scheduling: dict[str, Any],
    headers: dict[str, str],
    start_proxy: StartProxy,
    engine: ScriptedEngine,
) -> None:
    full = await filled(start_proxy, engine, **scheduling)
    session = await full.proxy.session()
    status, _ = await full.proxy.post(session, CHAT, chat(), **headers)
    assert status == 200
    assert not full.held.done()
    await full.free()


async def test_paused_call_is_not_released_by_a_restart_of_its_engine(
    start_proxy: StartProxy, engine: ScriptedEngine
) -> None:
    full = await filled(start_proxy, engine)
    session = await full.proxy.session()
    async with streamed(full, session) as response:
        await until_keep_alive(response)
        host, port = engine.url.removeprefix("http://").split(":")
        await engine.close()
        await engine.start(host, int(port))
        await full.held  # its connection broke; its session may call again, and keeps its room
        await full.until_paused()
        await full.free()
        assert b"[DONE]" in await response.read()


async def test_failed_call_of_the_only_engine_releases_no_paused_call(
    start_proxy: StartProxy, engine: ScriptedEngine
) -> None:
    full = await filled(start_proxy, engine)
    session, other = [await full.proxy.session() for _ in range(2)]
    async with streamed(full, session) as response:
        await until_keep_alive(response)
        engine.faults = [Fault("error")]
        impatient = {"x-stainless-timeout": "0.2"}
        assert (await full.proxy.post(other, CHAT, chat("Now."), **impatient))[0] == 200
        assert await full.metric("agentic_proxy_paused_calls") == 1
        assert len(engine.calls) == 3  # the one that stands still, the failed one and its retry
        await full.free()
        assert b"[DONE]" in await response.read()


async def test_further_samples_of_a_prompt_need_room_for_their_answers_only(
    start_proxy: StartProxy, engine: ScriptedEngine
) -> None:
    proxy = await start_proxy(engine=engine)
    while (await proxy.control.engines())[0]["cache_tokens"] is None:
        await engine.checked.wait()
    session = await proxy.session()
    status, reply = await proxy.post(session, CHAT, chat(n=3))
    assert status == 200
    assert len(reply["choices"]) == 3
