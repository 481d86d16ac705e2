"""What only PostgreSQL does: it forgets that a living proxy lives when it is restarted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import asyncpg
import pytest

from proxy.errors import ConfigurationError, SessionError, StoreError
from proxy.records import Mark, Reward, RuleAction, TurnStatus
from proxy.store import postgres_owner
from proxy.store import postgres_statements as statements
from proxy.store.postgres import PostgresStore
from proxy.store.protocol import DeliveryMark
from tests.needs import needs
from tests.postgres_server import binaries, empty_database, postgres_process
from tests.proxy.store.test_conformance import a_session, an_intent, answered

ID = "task/7-a"


@pytest.fixture
async def pair(postgres: str) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
    """Two proxies on one database; the first has begun a turn."""
    url = await empty_database(postgres)
    one, two = await PostgresStore.open(url), await PostgresStore.open(url)
    await one.create_session(a_session())
    await one.begin_turn(an_intent())
    yield one, two
    await one.close()
    await two.close()


async def lose_lock(store: PostgresStore) -> None:
    """As a restart of PostgreSQL does."""
    await store._owner.release()


async def noticed(store: PostgresStore) -> None:
    """Returns when the store knows that its connections are broken."""
    for _ in range(1_000_000):
        if store._owner._is_lost and not store._pool.get_size():
            return
        await asyncio.sleep(0)
    raise AssertionError("a connection to a killed server still counts as open")


async def test_proxy_that_lost_its_lock_does_not_answer_a_turn_that_was_cut(
    pair: tuple[PostgresStore, PostgresStore],
) -> None:
    one, two = pair
    await lose_lock(one)
    assert (await two.get_turns(ID))[0].status is TurnStatus.CUT
    with pytest.raises(StoreError, match="closed by another process"):
        await one.commit_turn(answered(an_intent()))
    assert (await two.get_turns(ID))[0].status is TurnStatus.CUT


async def test_answer_that_is_recorded_while_its_proxy_seems_dead_is_kept(
    pair: tuple[PostgresStore, PostgresStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair

    async def none_alive() -> set[int]:
        await one.commit_turn(answered(an_intent()))
        return set()

    monkeypatch.setattr(two, "_alive", none_alive)
    assert (await two.get_turns(ID))[0].status is TurnStatus.DONE


async def test_reader_gets_an_event_that_is_committed_after_a_later_one(
    pair: tuple[PostgresStore, PostgresStore],
) -> None:
    one, two = pair
    position = (await two.browser.recent(None, 100)).position
    slow = await asyncpg.connect(one._url)
    async with slow.transaction():
        sql = "INSERT INTO events (session_id, at, kind, data) VALUES ($1, 1.0, 'slow', '{}')"
        await slow.execute(sql, ID)
        await one.add_event(ID, "quick", {})
        during = await two.browser.recent(position, 100)
    await slow.close()
    after = await two.browser.recent(during.position, 100)
    kinds = [event["kind"] for event in (*during.events, *after.events)]
    assert kinds == ["slow", "quick"]
    assert (await two.browser.recent(after.position, 100)).position == after.position


@needs(None if binaries() else "PostgreSQL is not installed: apt-get install postgresql")
async def test_pool_of_a_killed_server_logs_lines_and_no_tracebacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged = asyncio.Event()
    programs = binaries()
    assert programs is not None

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.set()

    with postgres_process(programs) as server:
        store = await PostgresStore.open(server.url)
        pool_log, seen = logging.getLogger("asyncpg.pool"), Seen()
        pool_log.addHandler(seen)
        try:
            server.kill()
            await asyncio.wait_for(logged.wait(), 60)
        finally:
            pool_log.removeHandler(seen)
            await store.close()
    (first, *_) = (each for each in caplog.records if each.name == "asyncpg.pool")
    assert first.exc_info is None
    assert "Traceback" not in caplog.text
    assert "connection floor" in caplog.text
    assert "\n" not in first.getMessage()


@needs(None if binaries() else "PostgreSQL is not installed: apt-get install postgresql")
async def test_statements_wait_while_postgres_is_restarted() -> None:
    programs = binaries()
    assert programs is not None
    with postgres_process(programs) as server:
        store = await PostgresStore.open(server.url)
        await store.create_session(a_session())
        server.kill()
        await noticed(store)
        await store.announce(None)  # a proxy that stops meanwhile does not wait
        begun = asyncio.create_task(store.begin_turn(an_intent()))
        read = asyncio.create_task(store.get_session(ID))
        await asyncio.to_thread(server.start)
        await asyncio.wait_for(begun, 60)
        session = await asyncio.wait_for(read, 60)
        assert session is not None
        assert session.session_id == ID
        (turn,) = await store.get_turns(ID)
        assert turn.status is TurnStatus.OPEN
        await store.close()


@needs(None if binaries() else "PostgreSQL is not installed: apt-get install postgresql")
async def test_statements_fail_when_postgres_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_owner, "PATIENCE_S", 0.0)
    programs = binaries()
    assert programs is not None
    with postgres_process(programs) as server:
        store = await PostgresStore.open(server.url)
        server.kill()
        await noticed(store)
        with pytest.raises(StoreError, match=r"the store failed: .*Connect call failed"):
            await store.get_session(ID)
        await store.close()


@pytest.mark.parametrize("given", ["", ":secret"])
async def test_missing_password_is_told_where_to_put_it(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise asyncpg.InvalidPasswordError('password authentication failed for user "me"')

    monkeypatch.setattr(asyncpg, "create_pool", refused)
    with pytest.raises(ConfigurationError) as raised:
        await PostgresStore.open(f"postgresql://me{given}@127.0.0.1/sessions")
    told = "name its file in AGENTIC_PROXY_STORE_PASSWORD_FILE" in raised.value.message
    assert told is not bool(given)
    assert "secret" not in raised.value.message


async def test_what_is_written_while_a_session_is_removed_does_not_outlive_it(
    pair: tuple[PostgresStore, PostgresStore],
) -> None:
    """The removal has begun when the others write, and ends when they wait for it."""
    one, two = pair
    removing = await asyncpg.connect(one._url)
    held = removing.transaction()
    await held.start()
    await removing.execute(statements.LOCKED, ID)
    for table in statements.TABLES:
        await removing.execute(f"DELETE FROM {table} WHERE session_id = $1", ID)
    late = [
        asyncio.create_task(each)
        for each in (
            one.commit_turn(answered(an_intent())),
            one.set_turn_status(ID, 0, TurnStatus.SUPERSEDED),
            one.add_reward(ID, Reward("late", 1.0)),
            one.add_event(ID, "refused", {"message": "late"}),
            one.mark_deliveries([DeliveryMark(ID, 0, arrived=True)]),
            one.browser.add_mark(ID, Mark("late", RuleAction.MARK, 0, 1.0, "late")),
        )
    ]
    waiting = (
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    while await two._fetch(waiting) != [(len(late),)]:
        assert not any(each.done() for each in late)
    await held.commit()
    ended = await asyncio.gather(*late, return_exceptions=True)
    assert [type(each) for each in ended[:4]] == [SessionError] * 4
    assert ended[4:] == [None, False]
    for table in statements.TABLES:
        assert await removing.fetch(f"SELECT 1 FROM {table}") == []
    await removing.close()
