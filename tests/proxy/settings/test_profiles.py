"""Profiles of the configuration (key `profiles`) are used like the shipped ones."""

from __future__ import annotations

from proxy.records import Origin
from tests.proxy.conftest import StartProxy

CHAT = "chat/completions"
OWN = {"mine": {"history": "follow", "scrub": [r"Today is \d+\."], "agents": ["X-Sub-Agent"]}}
TICKETS = {"mine": {"tolerate": {"ticket": [r"ticket \d+"]}}}


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
    await proxy.control.complete(session.trial_id)
    listed = proxy.control.events(session.trial_id)
    events = [e async for e in listed if e["kind"] == "scrubbed"]
    removed = [(event["index"], *part.values()) for event in events for part in event["parts"]]
    (pattern,) = OWN["mine"]["scrub"]
    assert removed == [
        (number, pattern, "messages[0]", f"Today is {number + 1}.") for number in (0, 1)
    ]


async def test_without_the_profile_a_changed_system_message_forks(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(profiles=OWN)
    session = await proxy.session()
    await proxy.post(session, CHAT, asked(1))
    answer = {"role": "assistant", "content": "Hello."}
    await proxy.post(session, CHAT, asked(2, answer, {"role": "user", "content": "More."}))
    _, second = (await proxy.record(session))[1]
    assert second.fork_cause is not None


async def test_own_profile_tolerates_what_differs_in_a_branch(start_proxy: StartProxy) -> None:
    proxy = await start_proxy(profiles=TICKETS)
    session = await proxy.session(profile="mine")
    hello = {"role": "user", "content": "Close ticket 17."}
    _, recorded = await proxy.post(session, CHAT, {"messages": [hello]})
    branch = await proxy.control.branch(Origin(session.trial_id, 1))
    again = {"role": "user", "content": "Close ticket 4711."}
    status, answer = await proxy.post(branch, CHAT, {"messages": [again]})
    assert (status, answer["choices"]) == (200, recorded["choices"])
    assert len(proxy.engine.calls) == 1
