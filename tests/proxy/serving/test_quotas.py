"""A quota that sessions share (`proxy.extras.quotas`), at two proxies on one store."""

from __future__ import annotations

import asyncio

import pytest

from proxy.client import ProxyClientError
from proxy.testing.scripted_engine import Fault
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.serving.test_retries import NO_PATIENCE
from tests.proxy.serving.test_two_proxies import CHAT, at, chat


async def test_calls_of_all_sessions_at_all_proxies_count(two_proxies: list[RunningProxy]) -> None:
    control = two_proxies[0].control
    await control.set_quota("team/a", max_turns=5)
    sessions = [await proxy.session(limits={"quota": "team/a"}) for proxy in two_proxies * 4]
    free = await two_proxies[0].session()

    async def call(number: int) -> tuple[int, str]:
        proxy = two_proxies[number % 2]
        session = at(sessions[number], proxy)
        status, reply = await proxy.post(session, CHAT, chat(f"Question {number}"))
        return status, reply.get("error", {}).get("code", "")

    outcomes = await asyncio.gather(*map(call, range(8)))
    assert sorted(outcomes) == [(200, "")] * 5 + [(403, "quota")] * 3
    (quota,) = await two_proxies[1].control.quotas()
    sampled = sum(len(each.answer_ids) for each in two_proxies[0].engine.calls)
    assert (quota.name, quota.turns, quota.tokens) == ("team/a", 5, sampled)
    assert (await two_proxies[0].post(free, CHAT, chat("Hi.")))[0] == 200

    refused = outcomes.index((403, "quota"))
    await two_proxies[1].control.set_quota("team/a", max_turns=6)
    assert await call(refused) == (200, "")  # the refused call has left nothing behind
    other = next(n for n, each in enumerate(outcomes) if each[0] == 403 and n != refused)
    assert await call(other) == (403, "quota")
    _, turns = await control.get_turns(sessions[other].trial_id)
    assert turns == []


async def test_tokens_of_all_sessions_count(two_proxies: list[RunningProxy]) -> None:
    one, two = two_proxies
    await one.control.set_quota("q", max_tokens=1)
    session = await one.session(limits={"quota": "q"})
    assert (await one.post(session, CHAT, chat("Hi.")))[0] == 200
    later = await two.session(limits={"quota": "q"})
    status, reply = await two.post(later, CHAT, chat("Hi."))
    assert (status, reply["error"]["code"]) == (403, "quota")
    assert "the quota 'q' is used up" in reply["error"]["message"]


async def test_call_that_ends_before_its_first_token_does_not_count(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(limits=NO_PATIENCE)
    await proxy.control.set_quota("q", max_turns=1)
    session = await proxy.session(limits={"quota": "q"})
    proxy.engine.faults = [Fault("error") for _ in range(3)]
    refused = [(await proxy.post(session, CHAT, chat(f"Hi {n}.")))[0] for n in range(3)]
    assert refused == [503] * 3
    assert (await proxy.post(session, CHAT, chat("One.")))[0] == 200
    assert (await proxy.post(session, CHAT, chat("Two.")))[0] == 403


async def test_unknown_quota_is_refused_when_a_session_is_created(
    two_proxies: list[RunningProxy],
) -> None:
    with pytest.raises(ProxyClientError, match="there is no quota 'nobody'") as refused:
        await two_proxies[0].session(limits={"quota": "nobody"})
    assert refused.value.status == 400


@pytest.mark.parametrize("name", ["50%20off", "100%", "%2F", "a/../b", "ü ö", "'; --"])
async def test_name_of_a_quota_is_taken_as_it_is(
    two_proxies: list[RunningProxy], name: str
) -> None:
    one, two = two_proxies
    assert (await one.control.set_quota(name, max_turns=1)).name == name
    session = await two.session(limits={"quota": name})
    assert (await two.post(session, CHAT, chat("Hi.")))[0] == 200
    await one.control.remove_quota(name)
    assert (await two.post(session, CHAT, chat("More.")))[0] == 403
    with pytest.raises(ProxyClientError, match="there is no quota") as refused:
        await two.control.remove_quota(name)
    assert refused.value.status == 404


@pytest.mark.parametrize("name", ["a\0", "a\nb", "x" * 129])
async def test_name_that_a_store_may_not_hold_is_refused(
    two_proxies: list[RunningProxy], name: str
) -> None:
    with pytest.raises(
        ProxyClientError, match="use at most 128, none of them a control"
    ) as refused:
        await two_proxies[0].control.set_quota(name, max_turns=1)
    assert refused.value.status == 400


async def test_refused_call_with_several_choices_uses_nothing(
    two_proxies: list[RunningProxy],
) -> None:
    one, two = two_proxies
    await one.control.set_quota("q", max_turns=2)
    session = await one.session(limits={"quota": "q"})
    assert (await one.post(session, CHAT, chat("Hi.") | {"n": 3}))[0] == 403
    (quota,) = await two.control.quotas()
    assert (quota.turns, quota.tokens) == (0, 0)
    assert (await one.post(session, CHAT, chat("Hi.") | {"n": 2}))[0] == 200
    assert (await one.post(session, CHAT, chat("More.")))[0] == 403
