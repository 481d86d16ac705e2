"""Twenty promotions, one after the other, while users work: what happens to their calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from proxy.client import SessionHandle
from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import TARGET
from proxy.records import TurnStatus
from proxy.testing.scripted_engine import Script
from tests.proxy.conftest import RunningProxy, StartProxy

SWAPS, USERS, TURNS = 20, 4, 3
CHAT = "chat/completions"


class Work:
    """Users who have one session after the other, and call without a pause."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.proxy = proxy
        self.sessions: list[SessionHandle] = []
        self.statuses: list[int] = []
        self.ended = 0
        self.changed = asyncio.Condition()

    async def user(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            made = await self.proxy.control.create_session(metadata={"learn": "yes"})
            self.sessions.append(made)
            said: list[dict[str, Any]] = [{"role": "user", "content": "Go on."}]
            for _ in range(TURNS):
                status, answer = await self.proxy.post(made, CHAT, {"messages": said})
                self.statuses.append(status)
                said += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            await self.proxy.control.complete(made.trial_id)
            async with self.changed:
                self.ended += 1
                self.changed.notify_all()

    async def until(self, ended: int) -> None:
        """Until so many sessions have ended."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.ended >= ended)


async def test_twenty_promotions_lose_and_pause_no_call_and_mix_no_session(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    section = {"recorders": [{"policy": "work", "folder": str(tmp_path / "work")}]}
    proxy = await start_proxy(extras=[{"target": TARGET, "settings": section}])
    proxy.answers("Done.")
    plain, begun, goes_on = proxy.engine.script, asyncio.Event(), asyncio.Event()

    async def waits(prompt: list[int]) -> Sequence[int]:
        begun.set()
        await goes_on.wait()
        return cast("Sequence[int]", plain(prompt))

    key = (tmp_path / "work" / "learner.key").read_text().strip()
    work, stop = Work(proxy), asyncio.Event()
    async with LearnClient(proxy.url, key) as learner, asyncio.TaskGroup() as tasks:

        async def serve(number: int, script: Script) -> None:
            proxy.engine.adapters[f"work@{number}"] = script
            await learner.publish_adapter("work", number, f"work@{number}")
            await learner.assign("work", stable=number)

        # One call is in an engine from before the first swap until after the last one.
        await serve(1, waits)
        old = await proxy.control.create_session(metadata={"learn": "yes"})
        said = [{"role": "user", "content": "Take your time."}]
        long = tasks.create_task(proxy.post(old, CHAT, {"messages": said}))
        await begun.wait()
        await serve(2, plain)
        for _ in range(USERS):
            tasks.create_task(work.user(stop))
        for number in range(3, SWAPS + 2):
            await work.until(work.ended + 2)
            await serve(number, plain)
        await work.until(work.ended + 2 * USERS)
        stop.set()
        assert not long.done()
        goes_on.set()
        status, answer = await long
        assert status == 200
        said += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        assert (await proxy.post(old, CHAT, {"messages": said}))[0] == 200

    assert set(work.statuses) == {200}
    assert len(work.statuses) == TURNS * len(work.sessions)
    served = []
    for made in (*work.sessions, old):
        session, turns = await proxy.control.get_turns(made.trial_id)
        assert {turn.status for turn in turns} == {TurnStatus.DONE}
        assert {turn.policy for turn in turns} == {session.policy_of("")}
        served.append(session.policy_of(""))
    assert set(served) == {f"work-{number}" for number in range(1, SWAPS + 2)}
    assert served[-1] == "work-1"
