"""Profiles of the configuration (key `profiles`) are used like the shipped ones."""

from __future__ import annotations

from tests.proxy.conftest import StartProxy

CHAT = "chat/completions"
OWN = {"mine": {"history": "follow", "scrub": [r"Today is \d+\."], "agents": ["X-Sub-Agent"]}}


def asked(day: int, *more: dict[str, str]) -> dict[str, object]:
    system = {"role": "system", "content": f"Be brief. Today is {day}."}
    return {"messages": [system, {"role": "user", "content": "Hi."}, *more]}


async def test_own_profile_scrubs_system_messages_and_names_the_sub_agent(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(profiles=OWN)
    session = await proxy.session(profile="mine")
    await proxy.post(session, CHAT, asked(1), **{"X-Sub-Agent": "planner"})
    answer = {"role": "assistant", "content": "Hello."}
    await proxy.post(session, CHAT, asked(2, answer, {"role": "user", "content": "More."}))
    first, second = (await proxy.record(session))[1]
    assert first.agent_id == "planner"
    assert (second.parent, second.fork_cause) == (0, None)


async def test_without_the_profile_a_changed_system_message_forks(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(profiles=OWN)
    session = await proxy.session()
    await proxy.post(session, CHAT, asked(1))
    answer = {"role": "assistant", "content": "Hello."}
    await proxy.post(session, CHAT, asked(2, answer, {"role": "user", "content": "More."}))
    _, second = (await proxy.record(session))[1]
    assert second.fork_cause is not None
