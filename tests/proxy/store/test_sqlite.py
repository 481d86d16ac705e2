"""Faults of the SQLite store: full disks, locks, killed processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from proxy.errors import ConfigurationError, StoreError
from proxy.records import Turn, TurnStatus
from proxy.store import open_store, sqlite_group_commit
from proxy.store.sqlite import SqliteStore
from tests.proxy.store.test_conformance import a_session, an_intent


async def test_files_of_a_store_are_read_by_their_user_only(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        store = await open_store(f"sqlite:///{tmp_path}/in-a-repository.db")
        await store.create_session(a_session())
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    assert {"in-a-repository.db", "in-a-repository.db-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}


async def test_full_store_refuses_the_call_and_recovers(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite", max_file_bytes=256 * 1024)
    await store.create_session(a_session())
    huge = replace(an_intent(), prompt_ids=np.zeros(200_000, np.int32))
    with pytest.raises(StoreError, match="full"):
        await store.begin_turn(huge)
    assert await store.get_turns("task/7-a") == []
    await store.begin_turn(an_intent())
    assert len(await store.get_turns("task/7-a")) == 1
    await store.close()


async def test_locked_store_refuses_the_call_and_recovers(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite", busy_timeout_s=0.05)
    await store.create_session(a_session())
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        await store.begin_turn(an_intent())
    other.execute("ROLLBACK")
    other.close()
    await store.begin_turn(an_intent())
    await store.close()


async def test_lock_of_another_process_does_not_block_the_event_loop(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite", busy_timeout_s=60.0)
    await store.create_session(a_session())
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    went_on = threading.Event()

    def let_go() -> bool:
        in_time = went_on.wait(10)
        other.execute("ROLLBACK")
        return in_time

    released = asyncio.create_task(asyncio.to_thread(let_go))
    waiting = asyncio.create_task(store.begin_turn(an_intent()))
    for _ in range(8):  # iterations of the event loop, one of which tries to commit
        await asyncio.sleep(0)
    went_on.set()
    assert await released
    await waiting
    other.close()
    assert len(await store.get_turns("task/7-a")) == 1
    await store.close()


async def test_slow_commit_moves_the_next_one_to_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sqlite_group_commit, "SLOW_S", -1.0
    )  # the first commit already counts as slow
    connections = [
        sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None, check_same_thread=False)
        for _ in range(2)
    ]
    group = sqlite_group_commit.GroupWriter(connections[0], at_once=connections[1], max_pending=4)
    threads = [await group.write(lambda _: threading.current_thread().name) for _ in range(3)]
    assert threads == [threading.current_thread().name, "store-writer", "store-writer"]
    await group.close()


async def test_disk_that_stays_slow_stops_the_event_loop_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit takes 1.5 s of a clock that only commits move."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(sqlite_group_commit, "time", clock)
    connections = [
        sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None, check_same_thread=False)
        for _ in range(2)
    ]
    group = sqlite_group_commit.GroupWriter(connections[0], at_once=connections[1], max_pending=4)

    def commit(_: sqlite3.Connection, seconds: float = 1.5) -> str:
        now[0] += seconds
        return threading.current_thread().name

    threads = [await group.write(commit) for _ in range(30)]
    assert threads == [threading.current_thread().name, *["store-writer"] * 29]
    now[0] += sqlite_group_commit.SLOW_FOR_S  # the disk is fast again
    # The thread may still be counting the write before.
    threads = [await group.write(partial(commit, seconds=0.0)) for _ in range(90)]
    assert threads[-1] == threading.current_thread().name
    await group.close()


async def test_log_is_moved_into_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits in the event loop never do that; 40 MB would remain in the log."""
    monkeypatch.setattr(sqlite_group_commit, "COMMITS_PER_CHECKPOINT", 8)
    store = SqliteStore(tmp_path / "s.sqlite")
    await store.create_session(a_session())
    for _ in range(400):
        await store.add_event("task/7-a", "noted", {"text": "x" * 100_000})
    assert (tmp_path / "s.sqlite-wal").stat().st_size < 10 * 2**20
    assert len(await store.get_events("task/7-a")) == 400
    await store.close()


async def test_writes_beyond_the_queue_limit_are_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite", max_pending_writes=4)
    calls = [store.create_session(a_session(f"s-{i}")) for i in range(20)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(o is True for o in outcomes) == 4
    assert sum(isinstance(o, StoreError) for o in outcomes) == 16
    await store.close()


async def test_closed_store_refuses(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.sqlite")
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.create_session(a_session())


def test_unwritable_path_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere/s\.sqlite"):
        SqliteStore(tmp_path / "nowhere" / "s.sqlite")


OPENER = """
import asyncio, sys
from pathlib import Path
from proxy.store.sqlite import SqliteStore

async def main():
    print("ready", flush=True)
    for path in sys.stdin:
        await SqliteStore(Path(path.strip())).close()
        print("opened", flush=True)

asyncio.run(main())
"""

WRITER = """
import asyncio, sys
from pathlib import Path
from proxy.store.sqlite import SqliteStore
from tests.proxy.store.test_conformance import a_session, an_intent, answered

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.create_session(a_session())
    for index in range(1_000_000):
        await store.begin_turn(an_intent(index=index))
        print("begun", index, flush=True)
        await store.commit_turn(answered(an_intent(index=index)))
        print("done", index, flush=True)

asyncio.run(main())
"""


def test_processes_that_open_a_new_file_at_once_wait_for_each_other(tmp_path: Path) -> None:
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        assert [line_of(opener) for opener in openers] == ["ready\n"] * 4
        for n in range(25):
            for opener in openers:
                assert opener.stdin is not None
                opener.stdin.write(f"{tmp_path}/{n}.sqlite\n")
                opener.stdin.flush()
            assert [line_of(opener) for opener in openers] == ["opened\n"] * 4
    finally:
        for opener in openers:
            opener.kill()
            opener.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


HUNDREDS = "RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 900)"


async def test_a_file_that_another_process_writes_without_end_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    await SqliteStore(path).close()
    ended = threading.Event()

    def write() -> None:
        other = sqlite3.connect(path, timeout=60, isolation_level=None)
        while not ended.wait(0.001):  # so that others may write as well
            other.execute("BEGIN IMMEDIATE")
            other.execute(f"WITH {HUNDREDS} SELECT count(*) FROM n").fetchall()
            other.execute("COMMIT")
        other.close()

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        try:
            for _ in range(60):
                await SqliteStore(path, busy_timeout_s=60.0).close()
        finally:
            ended.set()
        writing.result()


def test_committed_writes_survive_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(101)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    reported = [line.split() for line in lines if line.endswith("\n")]
    begun = [int(n) for word, n in reported if word == "begun"]
    done = [int(n) for word, n in reported if word == "done"]

    turns = asyncio.run(read_turns(path))
    assert len(turns) >= len(begun) >= 50
    assert all(turns[n].status is TurnStatus.DONE for n in done)
    assert all(t.status in (TurnStatus.DONE, TurnStatus.CUT) for t in turns)


async def read_turns(path: Path) -> list[Turn]:
    store = SqliteStore(path)
    turns = await store.get_turns("task/7-a")
    await store.close()
    return turns


async def test_write_while_the_store_closes_is_refused(tmp_path: Path) -> None:
    connection = sqlite3.connect(
        tmp_path / "s.sqlite", isolation_level=None, check_same_thread=False
    )
    group = sqlite_group_commit.GroupWriter(connection, at_once=None, max_pending=4)
    go_on = threading.Event()
    slow = asyncio.create_task(group.write(lambda _: go_on.wait(10)))
    await asyncio.sleep(0)
    closing = asyncio.create_task(group.close())
    await asyncio.sleep(0)
    late = asyncio.create_task(group.write(lambda _: True))
    await asyncio.sleep(0)
    go_on.set()
    assert await slow
    await closing
    async with asyncio.timeout(5):
        with pytest.raises(StoreError, match="closed"):
            await late


async def test_reading_leaves_a_file_that_is_not_a_store_as_it_was(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty.db", tmp_path / "other.db"
    empty.touch()
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    for file in (empty, other):
        content = file.read_bytes()
        with pytest.raises(ConfigurationError, match=f"{file} is not a store of sessions"):
            await open_store(f"sqlite:///{file}", create=False)
        assert file.read_bytes() == content
    await (await open_store(f"sqlite:///{empty}")).close()
    await (await open_store(f"sqlite:///{empty}", create=False)).close()
