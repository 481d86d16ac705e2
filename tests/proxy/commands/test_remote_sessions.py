"""Sessions that a command reads from a proxy are those that it would read from the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from proxy.client import ProxyClient, ProxyClientError
from proxy.commands.remote_sessions import RemoteSessions
from proxy.config import RenderingConfig
from proxy.control.record_view import session_view
from proxy.records import (
    BranchMode,
    Mark,
    Origin,
    Reward,
    RuleAction,
    Session,
    SessionKind,
    SessionStatus,
)
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from proxy.store.protocol import SessionFilter
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.conftest import ADMIN_KEY, starting_proxies
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


@pytest.mark.parametrize(
    "origin", [None, Origin("a/1", 2, BranchMode.LIVE, salvage=True, system="s", answer="x")]
)
async def test_session_of_a_list_is_whole(origin: Origin | None) -> None:
    session = Session(
        "ann/1",
        b"a key",
        SessionKind.EVAL,
        SessionStatus.COMPLETED,
        created_at=5.0,
        expires_at=60.0,
        sampling={"temperature": 0.5, "policies": {"": "work-1"}},
        profile="codex",
        limits={"max_turns": 3},
        metadata={"person": "ann", "n": [1]},
        rewards=[Reward("check", 0.5, {"a": 0.5}), Reward("turns", 1.0, turn=1, branch=True)],
        marks=[Mark("tests", RuleAction.ZERO_REWARD, 1, 7.0, "rm test.py")],
        completed_at=9.0,
        origin=origin,
    )

    class Listing(ProxyClient):
        async def list_sessions(self, **where: str | int) -> list[dict[str, object]]:
            assert where == {"id_prefix": "ann/", "limit": "100"}
            found: list[dict[str, object]] = orjson.loads(orjson.dumps([session_view(session)]))
            return found

    found = await RemoteSessions(Listing("http://127.0.0.1:9", "k")).list_sessions(
        SessionFilter(id_prefix="ann/", limit=100)
    )
    assert found == [replace(session, key_hash=b"")]


async def test_images_are_those_of_sessions_that_were_read(
    seeing_checkpoint: Path, tmp_path: Path
) -> None:
    seeing = Rendering(load_tokenizer(seeing_checkpoint), RenderingConfig())
    async with (
        starting_proxies(seeing_checkpoint, seeing, tmp_path) as start,
        ScriptedEngine(lambda _: [], image_token=seeing.image_token) as engine,
    ):
        people = {each: tmp_path / f"{each}.key" for each in ("ann", "bob")}
        proxy = await start(engine=engine, people=people)
        await until_seeing(proxy)
        for person, picture in (("ann", FIRST), ("bob", SECOND)):
            session = await proxy.control.create_session(f"{person}/1")
            await chat(proxy, session, asked(picture, "What?"))
        store = await open_store(f"sqlite:///{tmp_path}/proxy.db", create=False)
        kept = await store.get_image(name(FIRST))
        await store.close()
        async with ProxyClient(proxy.url, people["ann"].read_text().strip()) as ann:
            mine = RemoteSessions(ann)
            assert await mine.get_image(name(FIRST)) is None
            await mine.get_turns("ann/1")
            assert await mine.get_image(name(FIRST)) == kept
            assert await mine.get_image(name(SECOND)) is None
            with pytest.raises(ProxyClientError) as error:
                await mine.get_turns("bob/1")
            assert error.value.status == 404
        async with ProxyClient(proxy.url, ADMIN_KEY) as admin:
            assert (await admin.recorded_image("bob/1", name(SECOND))).data == SECOND
