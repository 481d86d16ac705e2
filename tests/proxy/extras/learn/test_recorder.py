"""A recorder with learners, by its requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.client import ProxyClientError
from proxy.config import RenderingConfig
from proxy.extras.learn import extra
from proxy.extras.learn.assignment import Assignment
from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import TARGET
from proxy.records import Reward, SessionKind
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy, starting_proxies
from tests.proxy.serving.test_images import (
    FIRST,
    SECOND,
    asked,
    chat,
    name,
    seeing_checkpoint,
    until_seeing,
)

__all__ = ["seeing_checkpoint"]

TWO = ("ann", "bob")


def learners(folder: Path, **more: object) -> dict[str, object]:
    recorders = [
        {"policy": name, "folder": str(folder / name), "only": {"person": name}, **more}
        for name in TWO
    ]
    return {"extras": [{"target": TARGET, "settings": {"recorders": recorders}}]}


@asynccontextmanager
async def client(
    proxy: RunningProxy, folder: Path, policy: str = "ann"
) -> AsyncIterator[LearnClient]:
    key = (folder / policy / "learner.key").read_text().strip()
    async with LearnClient(proxy.url, key) as found:
        yield found


async def ended(proxy: RunningProxy, **metadata: str) -> str:
    session = await proxy.session(metadata=metadata)
    await proxy.post(session, "chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    await proxy.control.complete(session.trial_id)
    return session.trial_id


async def test_with_its_key_a_learner_reads_only_what_has_opted_in(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(**learners(tmp_path))
    mine = await ended(proxy, learn="yes", person="ann")
    hers = await ended(proxy, learn="yes", person="bob")
    private = await ended(proxy, person="ann")
    refused = await ended(proxy, learn="no", person="ann")
    running = await proxy.session(metadata={"learn": "yes", "person": "ann"})
    async with client(proxy, tmp_path) as ann:
        assert [each["trial_id"] for each in await ann.readable("ann")] == [mine]
        session, turns = await ann.record("ann", mine)
        assert session.session_id == mine
        assert turns
        for other in (hers, private, refused, "none"):
            with pytest.raises(ProxyClientError) as error:
                await ann.record("ann", other)
            assert error.value.status == 404
            with pytest.raises(ProxyClientError):
                await ann.say("ann", other, "x")
        with pytest.raises(ProxyClientError) as error:
            await ann.readable("bob")
        assert error.value.status == 401
        for call in (ann.list_sessions(), ann.get_turns(mine), ann.show(mine), ann.engines()):
            with pytest.raises(ProxyClientError) as error:
                await call
            assert error.value.status == 401
        await proxy.control.curate(mine, tags={"learn": "no"})
        assert await ann.readable("ann") == []
        with pytest.raises(ProxyClientError):
            await ann.record("ann", mine)
    assert running.trial_id


async def test_files_of_a_learner_are_for_its_owner(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    await start_proxy(**learners(tmp_path))
    assert (tmp_path / "ann").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "ann" / "learner.key").stat().st_mode & 0o777 == 0o600


async def test_a_session_keeps_its_adapter_and_a_canary_gets_its_share(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(**learners(tmp_path))
    proxy.engine.adapters |= {f"ann@{n}": proxy.engine.script for n in (1, 2)}

    async def policies(count: int, **metadata: str) -> Counter[str]:
        names = [(await proxy.session(metadata=metadata)).trial_id for _ in range(count)]
        sessions = [(await proxy.control.get_turns(name))[0] for name in names]
        return Counter(session.policy_of("any") for session in sessions)

    ann = {"learn": "yes", "person": "ann"}
    async with client(proxy, tmp_path) as learner:
        assert await policies(3, **ann) == {"": 3}
        with pytest.raises(ProxyClientError, match="not published"):
            await learner.assign("ann", stable=1)
        for number in (1, 2):
            await learner.publish_adapter("ann", number, f"ann@{number}")
        with pytest.raises(ProxyClientError, match="already"):
            await learner.publish_adapter("ann", 1, "ann@other")
        await learner.assign("ann", stable=1, canary=2, share=0.5)
        got = await policies(40, **ann)
        assert got.keys() == {"ann-1", "ann-2"}
        assert 12 <= got["ann-2"] <= 28
        assert await policies(3, learn="yes", person="bob") == {"": 3}
        assert await policies(3, person="ann") == {"": 3}
        kept = await proxy.session(metadata=ann)
        before = (await proxy.control.get_turns(kept.trial_id))[0].policy_of("")
        async with LearnClient(proxy.url, ADMIN_KEY) as admin:
            began = (await admin.state("ann"))["since"]
            assert (await admin.order("ann", "freeze"))["frozen"]
            assert await policies(10, **ann) == {"ann-1": 10}
            thawed = (await admin.order("ann", "thaw"))["since"]
            assert began < thawed == (await admin.order("ann", "thaw"))["since"]
            assert (await admin.order("ann", "rollback"))["order"] == "rollback"
            assert await policies(10, **ann) == {"ann-1": 10}
            await admin.order("ann", "promote")
            assert await policies(10, **ann) == {"ann-2": 10}
            with pytest.raises(ProxyClientError, match="401"):
                await learner.order("ann", "promote")
        await learner.assign("ann", stable=2, done="promote")
        assert (await learner.assignment("ann"))["order"] == ""
        assert await policies(5, **ann) == {"ann-2": 5}
        assert (await proxy.control.get_turns(kept.trial_id))[0].policy_of("") == before
    assert Assignment.read(tmp_path / "ann" / "assignment.json").stable == 2


async def test_switches_wait_for_the_learner_with_who_ordered_them(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file = tmp_path / "ann" / "assignment.json"
    file.parent.mkdir()
    file.write_text('{"stable": 0, "frozen": false, "since": 5.0, "created": 7}')  # an old one
    people = {"people": {"ann": tmp_path / "ann.key"}}
    proxy = await start_proxy(**learners(tmp_path), **people)
    proxy.engine.adapters |= {f"ann@{n}": proxy.engine.script for n in (1, 2)}
    async with (
        client(proxy, tmp_path) as learner,
        LearnClient(proxy.url, ADMIN_KEY) as admin,
        LearnClient(proxy.url, (tmp_path / "ann.key").read_text().strip()) as ann,
    ):
        assert (await learner.assignment("ann"))["switches"] == []
        await learner.publish_adapter("ann", 1, "ann@1")
        await learner.publish_adapter("ann", 2, "ann@2")
        await learner.assign("ann", stable=0, canary=1, share=0.5)
        for person, order in ((ann, "freeze"), (ann, "freeze"), (admin, "thaw"), (ann, "promote")):
            await person.order("ann", order)
        (first, *_, last) = seen = (await learner.assignment("ann"))["switches"]
        assert [(each["order"], each["person"], each["canary"]) for each in seen] == [
            ("freeze", "ann", None),
            ("thaw", "administrator", None),
            ("promote", "ann", 1),
        ]
        assert [each["at"] for each in seen] == sorted(each["at"] for each in seen)
        since = (await learner.assignment("ann"))["since"]
        kept = Assignment.read(file)
        assert [each.name for each in kept.switches] == [each["name"] for each in seen]
        now: dict[str, Any] = {"stable": 0, "canary": 1, "share": 0.5}
        await learner.assign("ann", **now, told=first["name"])
        await admin.order("ann", "rollback")
        await learner.assign("ann", **now, told=last["name"])
        await learner.assign("ann", **now, told=first["name"])  # an earlier one changes nothing
        after = await learner.assignment("ann")
        assert [each["order"] for each in after["switches"]] == ["rollback"]
        assert after["order"] == "rollback"
        assert after["since"] > since
        since = after["since"]
        await learner.assign("ann", **now, told=after["switches"][0]["name"])
        after = await learner.assignment("ann")
        assert (after["switches"], after["since"]) == ([], since)
        await learner.assign("ann", stable=0, canary=2, share=0.5)
        assert (await learner.assignment("ann"))["order"] == "", "it was about the other canary"


async def test_orders_that_no_learner_reads_are_bounded_and_a_stop_is_taken(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra, "MAX_SWITCHES", 3)
    proxy = await start_proxy(**learners(tmp_path))
    async with LearnClient(proxy.url, ADMIN_KEY) as admin:
        for order in ("freeze", "thaw", "freeze"):
            await admin.order("ann", order)
        with pytest.raises(ProxyClientError, match="has not read the last 3 orders") as error:
            await admin.order("ann", "thaw")
        assert error.value.status == 409
    monkeypatch.setattr(extra, "MAX_SWITCHES", 2)
    async with LearnClient(proxy.url, ADMIN_KEY) as admin:
        await admin.order("bob", "freeze")
        await admin.order("bob", "thaw")
        assert (await admin.order("bob", "freeze"))["frozen"]


async def test_a_decision_is_shown_at_the_session_and_named_policies_stay(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(**learners(tmp_path))
    mine = await ended(proxy, learn="yes", person="ann")
    async with client(proxy, tmp_path) as learner:
        await learner.say("ann", mine, "+1.00: rating up")
    assert (await proxy.control.show(mine))["metadata"]["learned"] == "+1.00: rating up"
    await proxy.control.add_reward(mine, Reward("x", 1.0))
    evaluated = await proxy.session(SessionKind.EVAL, metadata={"learn": "yes", "person": "ann"})
    assert (await proxy.control.get_turns(evaluated.trial_id))[0].policy_of("") == ""


async def test_sessions_that_are_created_at_once_are_all_counted(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    proxy = await start_proxy(**learners(tmp_path))
    ann = {"learn": "yes", "person": "ann"}
    await asyncio.gather(*(proxy.session(metadata=ann) for _ in range(40)))
    assert Assignment.read(tmp_path / "ann" / "assignment.json").created == 40


async def test_a_learner_gets_the_images_of_what_has_opted_in_alone(
    seeing_checkpoint: Path, tmp_path: Path
) -> None:
    seeing = Rendering(load_tokenizer(seeing_checkpoint), RenderingConfig())
    async with (
        starting_proxies(seeing_checkpoint, seeing, tmp_path) as start,
        ScriptedEngine(lambda _: [], image_token=seeing.image_token) as engine,
    ):
        proxy = await start(engine=engine, **learners(tmp_path))
        await until_seeing(proxy)
        sessions = {}
        for person, picture in (("ann", FIRST), ("bob", SECOND)):
            session = await proxy.session(metadata={"learn": "yes", "person": person})
            await chat(proxy, session, asked(picture, "What?"))
            await proxy.control.complete(session.trial_id)
            sessions[person] = session.trial_id
        async with client(proxy, tmp_path) as ann:
            assert await ann.image_of("ann", sessions["ann"], name(FIRST)) == FIRST
            for person, picture in (("ann", SECOND), ("bob", SECOND)):
                with pytest.raises(ProxyClientError) as error:
                    await ann.image_of("ann", sessions[person], name(picture))
                assert error.value.status == 404
            with pytest.raises(ProxyClientError) as error:
                await ann.image_of("bob", sessions["bob"], name(SECOND))
            assert error.value.status == 401
