"""Branches: recorded turns answer the first calls, and what follows continues the recorded ids."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import orjson
import pytest

from proxy.client import ProxyClientError, SessionHandle
from proxy.records import BranchMode, ForkCause, Origin, SessionKind, TurnStatus
from proxy.token_tree.paths import path, prefix
from tests.proxy.branching.agent import STEPS, TOOLS, SmallAgent, plays, record, result
from tests.proxy.conftest import RunningProxy, StartProxy

CONTEXT, DONE = TurnStatus.CONTEXT, TurnStatus.DONE


async def branch_of(
    parent: SmallAgent, turn: int, mode: BranchMode = BranchMode.STRICT, **more: Any
) -> SmallAgent:
    origin = Origin(parent.session.trial_id, turn, mode, **more)
    parent.proxy.engine.calls.clear()
    return SmallAgent(parent.proxy, await parent.proxy.control.branch(origin))


async def events(agent: SmallAgent, kind: str) -> list[dict[str, Any]]:
    agent_id = agent.session.trial_id
    url = f"{agent.proxy.url}/sessions/{agent_id}/events"
    headers = {"Authorization": f"Bearer {agent.proxy.control.admin_key}"}
    async with agent.proxy.http.get(url, headers=headers) as response:
        found = orjson.loads(await response.read())["events"]
    return [event for event in found if event["kind"] == kind]


async def metric(proxy: RunningProxy, line: str) -> float:
    headers = {"Authorization": f"Bearer {proxy.control.admin_key}"}
    async with proxy.http.get(f"{proxy.url}/metrics", headers=headers) as response:
        lines = (await response.text()).splitlines()
    return next((float(each.rpartition(" ")[2]) for each in lines if each.startswith(line)), 0.0)


@pytest.mark.parametrize("turn", range(1, STEPS + 1))
async def test_branch_replays_its_first_calls_and_goes_on_from_the_recorded_ids(
    proxy: RunningProxy, turn: int
) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, turn)

    status, _ = await branch.run(turn)

    assert status == 200
    assert proxy.engine.calls == []
    assert branch.answers == parent.answers[:turn]
    if turn < STEPS:
        await branch.run()
    assert branch.answers[-1]["content"] == parent.answers[-1]["content"]
    _, before = await proxy.record(parent.session)
    session, turns = await proxy.record(branch.session)
    assert session.origin == Origin(parent.session.trial_id, turn)
    assert [t.status for t in turns] == [CONTEXT] * turn + [DONE] * (STEPS - turn)
    assert [t.session_id for t in turns[:turn]] == [parent.session.trial_id] * turn
    assert [t.fork_cause for t in turns] == [None] * STEPS
    if turn < STEPS:
        first = proxy.engine.calls[0].prompt_ids
        recorded = path(before, turn - 1).tolist()
        assert first[: len(recorded)] == recorded
        own = turns[turn]
        assert first == prefix(turns, own.parent, own.shared_tokens, own.prompt_ids).tolist()
        assert own.shared_tokens == len(recorded)
    assert await metric(proxy, 'agentic_proxy_replayed_turns_total{match="exact"}') == turn


async def test_tolerated_differences_are_recorded_and_leave_the_recorded_ids(
    proxy: RunningProxy,
) -> None:
    proxy.answers(plays)
    parent = SmallAgent(proxy, await proxy.session())
    parent.system = f"You work in /data/{parent.session.trial_id}/work since 2026-11-22 14:03:59."
    parent.tool = lambda step: f"pid 4711 took 0.21 s in /tmp/tmpAb3_x9/out: {step}"
    await parent.run()
    branch = await branch_of(parent, 3)
    branch.system = f"You work in /data/{branch.session.trial_id}/work since 2027-01-02 03:04:05."
    branch.tool = lambda step: f"pid 99 took 1.7 s in /tmp/tmpQQ8_zz/out: {step}"

    status, _ = await branch.run()

    assert status == 200
    assert len(proxy.engine.calls) == STEPS - 3
    _, before = await proxy.record(parent.session)
    recorded = path(before, 2).tolist()
    assert all(call.prompt_ids[: len(recorded)] == recorded for call in proxy.engine.calls)
    noted = await events(branch, "tolerated")
    assert [event["turn"] for event in noted] == [0, 1, 2]
    names = [[each["name"] for each in event["differences"]] for event in noted]
    assert names == [["session", "time"], *[["process", "duration", "temporary"]] * 2]
    assert noted[1]["differences"][1] == {"name": "duration", "recorded": "0.21 s", "seen": "1.7 s"}
    assert await metric(proxy, 'agentic_proxy_replayed_turns_total{match="tolerated"}') == 3


async def test_strict_branch_stops_at_a_real_difference(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 4)
    branch.tool = lambda step: "another result" if step == 1 else result(step)

    status, body = await branch.run()

    assert status == 403
    assert body["error"]["code"] == "diverged"
    assert (
        "at the recorded turn 2, message 5 differs: recorded 'result of step 1', got"
        " 'another result'" in body["error"]["message"]
    )
    assert proxy.engine.calls == []
    (found,) = await events(branch, "diverged")
    assert (found["mode"], found["turn"], found["message"]) == ("strict", 2, 5)
    assert "-result of step 1\n+another result" in found["diff"]
    branch.messages[-1]["content"] = result(1)
    status, again = await branch.ask()
    assert (status, again["error"]["message"]) == (403, body["error"]["message"])
    assert await metric(proxy, 'agentic_proxy_diverged_calls_total{mode="strict"}') == 1


async def test_live_branch_goes_on_as_a_fork(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 4, BranchMode.LIVE)
    branch.tool = lambda step: "another result" if step == 1 else result(step)

    status, _ = await branch.run()

    assert status == 200
    assert len(proxy.engine.calls) == STEPS - 2
    _, turns = await proxy.record(branch.session)
    _, before = await proxy.record(parent.session)
    assert [t.fork_cause for t in turns[4:]] == [ForkCause.DIVERGED, None, None]
    assert (turns[4].parent, turns[4].shared_tokens) == (1, before[1].path_tokens)
    assert turns[4].status is DONE
    assert await metric(proxy, 'agentic_proxy_diverged_calls_total{mode="live"}') == 1


async def test_other_first_message_diverges_at_once(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 2)
    branch.system = "Use nothing."
    status, body = await branch.run()
    assert (status, body["error"]["code"]) == (403, "diverged")
    assert "turn 0, message 0 differs: recorded 'Use the shell.'" in body["error"]["message"]


async def test_retry_gets_the_recorded_answer_again(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 2)
    await branch.run(1)
    del branch.messages[2:]
    _, again = await branch.ask(**{"x-stainless-retry-count": "1"})
    assert again["choices"][0]["message"] == parent.answers[0]
    branch.take(again["choices"][0]["message"])
    await branch.run(1)
    assert branch.answers[-1] == parent.answers[1]
    assert proxy.engine.calls == []


async def test_repeated_request_after_the_replay_is_a_sample_of_its_own(
    proxy: RunningProxy,
) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 2)
    await branch.run(1)
    del branch.messages[2:]
    status, _ = await branch.ask()
    assert status == 200
    _, turns = await proxy.record(branch.session)
    assert [(t.status, t.fork_cause) for t in turns] == [
        (CONTEXT, None),
        (CONTEXT, None),
        (DONE, ForkCause.SIBLING),
    ]


async def test_parallel_conversations_are_replayed_in_any_order(proxy: RunningProxy) -> None:
    proxy.answers(plays)
    session = await proxy.session()
    agents = [SmallAgent(proxy, session, system=f"You are agent {n}.") for n in range(3)]
    await asyncio.gather(*(agent.run(2) for agent in agents))
    parent = agents[0]
    for turn in range(1, 7):
        branch = await branch_of(parent, turn)
        again = [SmallAgent(proxy, branch.session, system=a.system) for a in reversed(agents)]
        done = await asyncio.gather(*(agent.run(2) for agent in again))
        assert [status for status, _ in done] == [200] * 3
        assert len(proxy.engine.calls) == 6 - turn
        assert await events(branch, "diverged") == []
        _, turns = await proxy.record(branch.session)
        assert [t.status for t in turns] == [CONTEXT] * turn + [DONE] * (6 - turn)


def plays_at_once(prompt: str) -> str:
    """Three calls in the first answer, then one call."""
    calls = (
        f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "step {n}"}}}}\n</tool_call>'
        for n in range(3)
    )
    done = prompt.count("<tool_response>\n")
    return "\n".join(calls) if done == 0 else plays(prompt)


@pytest.mark.parametrize("recorded", [(1, 0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seen", [(2, 1, 0), (1, 0, 2)])
async def test_results_of_calls_at_once_may_come_in_another_order(
    proxy: RunningProxy, recorded: tuple[int, ...], seen: tuple[int, ...]
) -> None:
    async def run(agent: SmallAgent, order: tuple[int, ...]) -> None:
        await agent.run(1)
        agent.messages[-3:] = [agent.messages[-3:][at] for at in order]
        status, body = await agent.run()
        assert status == 200, body

    proxy.answers(plays_at_once)
    parent = SmallAgent(proxy, await proxy.session())
    await run(parent, recorded)
    branch = await branch_of(parent, 2)
    await run(branch, seen)
    assert branch.answers == parent.answers[:2] + branch.answers[2:]
    _, before = await proxy.record(parent.session)
    first = proxy.engine.calls[0].prompt_ids
    assert first[: before[2].shared_tokens] == path(before, 1).tolist()
    assert len(proxy.engine.calls) == len(before) - 2
    orders = [" ".join(map(str, order)) for order in (recorded, seen)]
    moved = [{"name": "order", "recorded": orders[0], "seen": orders[1]}]
    expected = [moved] if recorded != seen else []
    assert [event["differences"] for event in await events(branch, "tolerated")] == expected


async def test_result_that_differs_among_calls_at_once_diverges(proxy: RunningProxy) -> None:
    proxy.answers(plays_at_once)
    parent = SmallAgent(proxy, await proxy.session())
    await parent.run()
    branch = await branch_of(parent, 2)
    branch.tool = lambda step: "another result" if step == 1 else result(step)
    await branch.run(1)
    branch.messages[-3:] = reversed(branch.messages[-3:])
    status, body = await branch.run()
    assert status == 403
    assert "recorded 'result of step 1', got 'another result'" in body["error"]["message"]


async def test_several_samples_of_one_request_are_replayed(proxy: RunningProxy) -> None:
    proxy.answers(plays)
    session = await proxy.session()
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "n": 3, "tools": TOOLS}
    _, first = await proxy.post(session, "chat/completions", body)
    branch = await branch_of(SmallAgent(proxy, session), 3)
    _, again = await proxy.post(branch.session, "chat/completions", body)
    assert again["choices"] == first["choices"]
    assert again["usage"] == first["usage"]
    assert proxy.engine.calls == []


async def test_branch_of_a_branch_replays_both(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    one = await branch_of(parent, 2)
    one.tool = lambda step: f"{result(step)} (again)" if step >= 2 else result(step)
    await one.run()
    two = await branch_of(one, 4)
    two.tool = one.tool
    await two.run(4)
    assert two.answers == one.answers[:4]
    assert proxy.engine.calls == []
    await two.run()
    _, turns = await proxy.record(two.session)
    names = [parent, parent, one, one, two]
    assert [turn.session_id for turn in turns] == [agent.session.trial_id for agent in names]


async def test_branch_goes_on_in_a_new_proxy(start_proxy: StartProxy) -> None:
    first = await start_proxy()
    parent = await record(first)
    branch = await branch_of(parent, 3)
    await branch.run(2)
    second = await start_proxy(engine=first.engine)
    second.answers(plays)
    url = branch.session.base_url.replace(first.url, second.url)
    moved = type(branch.session)(branch.session.trial_id, branch.session.api_key, url, "", 0.0)
    later = SmallAgent(second, moved, messages=branch.messages)
    status, _ = await later.run()
    assert status == 200
    assert [*branch.answers, *later.answers][:3] == parent.answers[:3]
    assert len(first.engine.calls) == STEPS - 3
    _, turns = await second.record(moved)
    assert [t.status for t in turns] == [CONTEXT] * 3 + [DONE] * 2


async def test_edited_system_message_applies_to_the_calls_after_the_recorded_ones(
    proxy: RunningProxy,
) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 2, system="Answer in verse.")
    status, _ = await branch.run()
    assert status == 200
    decode = proxy.rendering.tokenizer.decode
    prompts = [decode(call.prompt_ids) for call in proxy.engine.calls]
    assert all("Answer in verse." in p and "Use the shell." not in p for p in prompts)
    _, turns = await proxy.record(branch.session)
    assert [t.fork_cause for t in turns[2:]] == [ForkCause.SYSTEM_CHANGED, None, None]


async def test_given_answer_is_sent_once_and_never_trained(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    text = '<tool_call>\n{"name": "shell", "arguments": {"command": "step 7"}}\n</tool_call>'
    branch = await branch_of(parent, 2, answer=text)
    status, _ = await branch.run()
    assert status == 200
    call = branch.answers[2]["tool_calls"][0]["function"]
    assert (call["name"], orjson.loads(call["arguments"])) == ("shell", {"command": "step 7"})
    assert len(proxy.engine.calls) == STEPS - 3
    _, turns = await proxy.record(branch.session)
    assert [t.status for t in turns] == [CONTEXT] * 3 + [DONE] * 2
    assert [t.fork_cause for t in turns] == [None] * STEPS
    assert proxy.engine.calls[0].prompt_ids[: turns[2].path_tokens] == path(turns, 2).tolist()


async def test_branch_takes_over_the_settings_of_its_origin(proxy: RunningProxy) -> None:
    parent = await record(
        proxy, kind=SessionKind.EVAL, sampling={"temperature": 0.5}, limits={"max_turns": 9}
    )
    branch = await branch_of(parent, 1)
    session, _ = await proxy.record(branch.session)
    assert (session.kind, session.sampling) == (SessionKind.EVAL, {"temperature": 0.5})
    assert session.limits == {"max_turns": 9}


async def test_wrong_origins_are_refused(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    name = parent.session.trial_id
    with pytest.raises(ProxyClientError, match="has 5; give a number from 1 to 5"):
        await proxy.control.branch(Origin(name, 6))
    with pytest.raises(ProxyClientError, match="'nobody' does not exist"):
        await proxy.control.branch(Origin("nobody", 1))
    await proxy.control.branch(Origin(name, 2, salvage=True))
    with pytest.raises(ProxyClientError, match="is salvaged by"):
        await proxy.control.branch(Origin(name, 2, salvage=True))
    with pytest.raises(ProxyClientError, match="1 branches refer to its turns"):
        await proxy.control.delete(name)


async def test_recorded_log_probabilities_and_ids_are_sent_again(proxy: RunningProxy) -> None:
    proxy.answers("Five.")
    session = await proxy.session()
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "2 + 3?"}],
        "logprobs": True,
        "return_token_ids": True,
    }
    _, first = await proxy.post(session, "chat/completions", body)
    branch = await branch_of(SmallAgent(proxy, session), 1)
    _, again = await proxy.post(branch.session, "chat/completions", body)
    for answer in (first, again):
        del answer["id"], answer["created"]
    assert again == first
    assert np.isfinite([t["logprob"] for t in again["choices"][0]["logprobs"]["content"]]).all()


DIALECTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "responses": {"input": "Hi."},
    "messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 50},
    "completions": {"prompt": "Once upon a time"},
}


def without_ids(data: bytes) -> bytes:
    """An answer without the parts that differ by call."""
    patterns = (rb'"(id|response_id)":"[^"]*"', rb'"item_id":"[^"]*"', rb'"created[_at]*":[\d.]+')
    for pattern in patterns:
        data = re.sub(pattern, b"", data)
    return data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", DIALECTS)
async def test_each_dialect_is_replayed(proxy: RunningProxy, route: str, stream: bool) -> None:
    proxy.answers("It was a sunny day.")
    body = {"model": "m", "stream": stream, **DIALECTS[route]}

    async def answer(session: SessionHandle) -> tuple[str, Any]:
        if not stream:
            status, answer = await proxy.post(session, route, body)
            assert status == 200
            return "", without_ids(orjson.dumps(answer))
        found = b"".join(await proxy.events(session, route, body))
        return "".join(re.findall(r'"(?:delta|text|content)":"([^"]*)"', found.decode())), None

    session = await proxy.session()
    first = await answer(session)
    branch = await branch_of(SmallAgent(proxy, session), 1)
    again = await answer(branch.session)
    if stream:
        assert "It was a sunny day." in again[0]
    else:
        assert again == first
    assert proxy.engine.calls == []
    status, _ = await proxy.post(branch.session, route, {"model": "m", **DIALECTS[route]})
    assert status == 200


async def test_response_that_names_the_previous_one_is_replayed(proxy: RunningProxy) -> None:
    proxy.answers("Five.")

    async def two_calls(session: SessionHandle, second: str) -> tuple[int, Any]:
        _, first = await proxy.post(session, "responses", {"model": "m", "input": "2 + 3?"})
        body = {"model": "m", "previous_response_id": first["id"], "input": second}
        return await proxy.post(session, "responses", body)

    session = await proxy.session()
    await two_calls(session, "It is 12:00:01. And 3 + 3?")
    parent = SmallAgent(proxy, session)
    branch = await branch_of(parent, 2)
    status, _ = await two_calls(branch.session, "It is 12:34:56. And 3 + 3?")
    assert status == 200
    assert proxy.engine.calls == []
    other = await branch_of(parent, 2)
    status, body = await two_calls(other.session, "And 4 + 3?")
    assert (status, body["error"]["code"]) == (403, "diverged")


async def test_required_call_of_a_model_that_reasons_is_replayed(proxy: RunningProxy) -> None:
    rest = ' {"command": "ls"}}\n</tool_call>'
    proxy.answers(
        lambda prompt: rest if prompt.endswith('"arguments":') else "<think>\nHm.\n</think>\n\nNo."
    )
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi."}],
        "tools": TOOLS,
        "tool_choice": "required",
    }
    session = await proxy.session()
    _, first = await proxy.post(session, "chat/completions", body)
    _, turns = await proxy.record(session)
    assert [t.fork_cause for t in turns] == [None, ForkCause.CALL_REQUIRED]
    branch = await branch_of(SmallAgent(proxy, session), 2)
    _, again = await proxy.post(branch.session, "chat/completions", body)
    assert again["choices"] == first["choices"]
    assert again["usage"] == first["usage"]
    assert proxy.engine.calls == []


async def test_profile_that_follows_the_agent_is_replayed(proxy: RunningProxy) -> None:
    parent = await record(proxy, profile="follow")
    branch = await branch_of(parent, 3)
    status, _ = await branch.run()
    assert status == 200
    assert branch.answers[:3] == parent.answers[:3]
    assert len(proxy.engine.calls) == STEPS - 3


async def test_tokens_are_counted_as_in_the_recording(proxy: RunningProxy) -> None:
    proxy.answers("Five.")
    route, counted = "messages", "messages/count_tokens"

    def body(time: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"It is {time}."}]
        return {"model": "m", "messages": messages, "max_tokens": 9}

    session = await proxy.session()
    await proxy.post(session, route, body("12:00:00"))
    _, first = await proxy.post(session, counted, body("12:00:00"))
    branch = await branch_of(SmallAgent(proxy, session), 1)
    _, again = await proxy.post(branch.session, counted, body("09:08:07.123456"))
    assert again == first
    assert (await proxy.record(branch.session))[1][0].status is CONTEXT


async def test_answer_that_did_not_arrive_is_sent_again(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    branch = await branch_of(parent, 2)
    body = {"model": "m", "messages": parent.messages[:2], "tools": TOOLS, "stream": True}
    headers = {"Authorization": f"Bearer {branch.session.api_key}"}
    url = f"{branch.session.base_url}/chat/completions"
    async with proxy.http.post(url, data=orjson.dumps(body), headers=headers) as response:
        response.close()
    status, _ = await branch.run(2)
    assert status == 200
    assert branch.answers == parent.answers[:2]
    assert proxy.engine.calls == []


async def test_replayed_calls_do_not_count_against_the_limits(proxy: RunningProxy) -> None:
    parent = await record(proxy)
    origin = Origin(parent.session.trial_id, 3)
    session = await proxy.control.branch(origin, limits={"max_turns": 4})
    branch = SmallAgent(proxy, session)
    proxy.engine.calls.clear()
    status, body = await branch.run()
    assert (status, body["error"]["code"]) == (403, "max_turns")
    assert len(proxy.engine.calls) == 1


async def test_further_answers_to_a_recorded_request_count_against_the_limits(
    proxy: RunningProxy,
) -> None:
    parent = await record(proxy)
    origin = Origin(parent.session.trial_id, 3)
    session = await proxy.control.branch(origin, limits={"max_turns": 4})
    proxy.engine.calls.clear()
    body = {"model": "m", "messages": parent.messages[:2], "tools": TOOLS}
    replies = [await proxy.post(session, "chat/completions", body) for _ in range(4)]
    assert [status for status, _ in replies] == [200, 200, 403, 403]
    assert replies[-1][1]["error"]["code"] == "max_turns"
    assert len(proxy.engine.calls) == 1
