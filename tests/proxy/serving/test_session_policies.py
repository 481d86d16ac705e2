"""A session samples only from its own policies, whatever its agent requests."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.client import SessionHandle
from proxy.records import SessionKind
from tests.proxy.conftest import RunningProxy

POLICIES = ("planner", "coder", "stranger")
HOSTILE = [
    "stranger",
    "stranger@1.aa",
    "planner@1.aa",
    "scripted",
    "policies",
    "",
    " small ",
    "SMALL",
    "../small",
    "small\x00",
    "__class__",
    "\u2110" * 40,
]


def serve_policies(proxy: RunningProxy) -> None:
    """Adapters whose answers are the name of the policy."""
    tokenizer = proxy.rendering.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for name in POLICIES:
        for version in (1, 2):
            answer = [*tokenizer.encode(f"I am {name} {version}."), end]
            proxy.engine.adapters[f"{name}@{version}.aa"] = lambda _, answer=answer: answer  # type: ignore[misc]


async def publish(proxy: RunningProxy, version: int, *names: str) -> None:
    for name in names or POLICIES:
        await proxy.control.publish_policy(name, version, f"{name}@{version}.aa")


async def ask(
    proxy: RunningProxy, session: SessionHandle, model: str, text: str = "Who are you?", **more: Any
) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    status, answer = await proxy.post(session, "chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


async def test_model_name_chooses_among_the_sessions_own_policies(proxy: RunningProxy) -> None:
    serve_policies(proxy)
    await publish(proxy, 1)
    session = await proxy.session(policies={"": "planner", "small": "coder", "raw": ""})
    assert await ask(proxy, session, "anything") == "I am planner 1."
    assert await ask(proxy, session, "small", "And you?") == "I am coder 1."
    assert await ask(proxy, session, "raw", "You too?") == "Hello."
    await publish(proxy, 2, "coder")
    assert await ask(proxy, session, "small", "Still?") == "I am coder 2."
    assert await ask(proxy, session, "big", "Still?") == "I am planner 1."
    recorded, turns = await proxy.record(session)
    assert recorded.sampling["policies"] == {"": "planner", "small": "coder", "raw": ""}
    assert [turn.policy for turn in turns] == ["planner", "coder", "", "coder", "planner"]
    assert [turn.versions[0].version for turn in turns] == [1, 1, 0, 2, 1]


async def test_same_request_to_two_policies_is_answered_by_each(proxy: RunningProxy) -> None:
    """Also if the second one is marked as a retry: it neither joins nor replays the other's."""
    serve_policies(proxy)
    await publish(proxy, 1)
    session = await proxy.session(policies={"": "planner", "small": "coder"})
    asked = [ask(proxy, session, model) for model in ("big", "small")]
    assert await asyncio.gather(*asked) == ["I am planner 1.", "I am coder 1."]
    retried = {"x-stainless-retry-count": "1"}
    for model, policy in (("small", "coder"), ("big", "planner")):
        body = {"model": model, "messages": [{"role": "user", "content": "Again?"}]}
        status, answer = await proxy.post(session, "chat/completions", body, **retried)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == f"I am {policy} 1."
    _, turns = await proxy.record(session)
    assert {turn.status.value for turn in turns} == {"done"}


async def test_prompts_without_messages_are_of_the_policy_too(proxy: RunningProxy) -> None:
    serve_policies(proxy)
    await publish(proxy, 1)
    session = await proxy.session(policies={"": "planner", "small": "coder"})
    for model, policy in (("big", "planner"), ("small", "coder")):
        body = {"model": model, "prompt": "Who are you?"}
        status, answer = await proxy.post(session, "completions", body)
        assert status == 200
        assert answer["choices"][0]["text"] == f"I am {policy} 1."


async def test_sessions_without_policies_sample_from_the_engines_weights(
    proxy: RunningProxy,
) -> None:
    serve_policies(proxy)
    await publish(proxy, 1)
    session = await proxy.session()
    for model in ("planner", "planner@1.aa"):
        assert await ask(proxy, session, model) == "Hello."
    assert not [call.model for call in proxy.engine.calls if "@" in (call.model or "")]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(models=st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20)), max_size=5))
async def test_no_model_name_reaches_another_policy(proxy: RunningProxy, models: list[str]) -> None:
    """Of a session with two policies, a session with one, and an evaluation, at the same time."""
    serve_policies(proxy)
    await publish(proxy, 1)
    two = await proxy.session(policies={"": "planner", "small": "coder"})
    one = await proxy.session(policies={"": "coder"})
    trial = await proxy.session(SessionKind.EVAL, policies={"small": "planner"})
    before = len(proxy.engine.calls)
    asked = [
        (session, model)
        for session in (two, one, trial)
        for model in [*models, "small"]
        if model.isprintable()
    ]
    answers = await asyncio.gather(
        *(ask(proxy, session, model, f"{n}?") for n, (session, model) in enumerate(asked)),
        publish(proxy, 2),
    )
    allowed = {two.trial_id: {"small": "coder"}, trial.trial_id: {"small": "planner"}}
    defaults = {two.trial_id: "planner", one.trial_id: "coder", trial.trial_id: ""}
    for (session, model), answer in zip(asked, answers, strict=False):
        of_models = allowed.get(session.trial_id, {})
        policy = of_models.get(model, defaults[session.trial_id])
        assert str(answer).startswith(f"I am {policy} " if policy else "Hello.")
    assert not any("stranger" in (call.model or "") for call in proxy.engine.calls[before:])


MAPPINGS = st.dictionaries(
    st.sampled_from(["", "small", "large"]), st.sampled_from(["", *POLICIES]), max_size=3
)
ASKED = st.lists(st.sampled_from(["small", "large", "other"]), min_size=1, max_size=3)
UPDATES = st.lists(st.tuples(st.sampled_from(POLICIES), st.sampled_from((1, 2, 3))), max_size=8)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sessions=st.lists(st.tuples(MAPPINGS, ASKED), min_size=2, max_size=5), updates=UPDATES)
async def test_each_token_is_of_the_sessions_own_policy_at_its_recorded_version(
    proxy: RunningProxy,
    sessions: list[tuple[dict[str, str], list[str]]],
    updates: list[tuple[str, int]],
) -> None:
    """Sessions with different maps call at the same time, while policies get new versions, which
    cut running answers."""
    tokenizer = proxy.rendering.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    letters = iter("abcdefghij")
    token_of = {("", 0): tokenizer.encode(next(letters))[0]}
    for policy in POLICIES:
        for version in (1, 2, 3):
            token = token_of[policy, version] = tokenizer.encode(next(letters))[0]
            answer = [token] * 8 + [end]
            proxy.engine.adapters[f"{policy}@{version}.aa"] = lambda _, answer=answer: answer  # type: ignore[misc]
    own = [token_of["", 0]] * 8 + [end]
    proxy.engine.script = lambda _: own
    proxy.engine.token_delay_s = 0.001
    await publish(proxy, 1)

    async def run(policies: dict[str, str], asked: list[str]) -> None:
        session = await proxy.session(policies=policies)
        for number, model in enumerate(asked):
            await ask(proxy, session, model, f"Question {number}?")
        _, turns = await proxy.record(session)
        default = policies.get("", "")
        assert [turn.policy for turn in turns] == [policies.get(m, default) for m in asked]
        for turn in turns:
            spans = [(s.version, turn.sampled_ids[s.start : s.end].tolist()) for s in turn.versions]
            for version, ids in spans:
                assert set(ids) - {end} <= {token_of[turn.policy, version]}
            assert sum(len(ids) for _, ids in spans) == len(turn.sampled_ids) > 0

    async with asyncio.TaskGroup() as running:
        for policies, asked in sessions:
            running.create_task(run(policies, asked))
        for policy, version in updates:
            await proxy.control.publish_policy(policy, version, f"{policy}@{version}.aa")
