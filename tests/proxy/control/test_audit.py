"""The audit log: one line per change, with a digest of the key, and no line for reading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest

from proxy.client import ProxyClient, ProxyClientError
from proxy.control.audit import key_digest
from proxy.machine.logs import AUDIT, CALLS, JsonLines, LogKind, LogLevel, set_up
from proxy.records import Reward
from proxy.store import open_store
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy

LOGGED: list[tuple[LogKind, bool]] = [("text", False), ("json", True)]


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    """The lines of the audit log, as JSON logs have them."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(orjson.loads(JsonLines().format(record)))

    audit, handler = logging.getLogger(AUDIT), Keep()
    level = audit.level
    audit.setLevel(logging.INFO)
    audit.addHandler(handler)
    yield found
    audit.removeHandler(handler)
    audit.setLevel(level)


async def test_changes_and_refused_keys_are_logged_and_reading_is_not(
    proxy: RunningProxy, lines: list[dict[str, Any]]
) -> None:
    session = await proxy.session()
    named = await proxy.control.create_session("named")
    await proxy.control.add_reward(named.trial_id, Reward("passed", 1.0))
    await proxy.control.list_sessions()
    await proxy.control.get_turns(named.trial_id)
    await proxy.control.complete(named.trial_id)
    with pytest.raises(ProxyClientError):
        await proxy.control.create_session("named")
    async with ProxyClient(proxy.url, "a-wrong-key") as intruder:
        with pytest.raises(ProxyClientError):
            await intruder.list_sessions()
    digest = key_digest(ADMIN_KEY)
    assert [(x["operation"], x["trial_id"], x["status"], x["key"]) for x in lines] == [
        ("create", session.trial_id, 201, digest),
        ("create", "named", 201, digest),
        ("reward", "named", 200, digest),
        ("complete", "named", 200, digest),
        ("create", "named", 409, digest),
        ("list", None, 401, key_digest("a-wrong-key")),
    ]
    assert all(line["remote"] == "127.0.0.1" for line in lines)
    text = orjson.dumps(lines).decode()
    assert not any(key in text for key in (ADMIN_KEY, "a-wrong-key", session.api_key))


@pytest.mark.parametrize(("fault", "status"), [(None, 499), (ZeroDivisionError("a fault"), 500)])
async def test_change_that_is_not_answered_is_logged(
    start_proxy: StartProxy,
    lines: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception | None,
    status: int,
) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/audited.db")
    delete, deleted, over = store.delete_session, asyncio.Event(), asyncio.Event()

    async def delete_and_stand_still(session_id: str) -> None:
        await delete(session_id)
        deleted.set()
        try:
            if fault is not None:
                raise fault
            await asyncio.Event().wait()
        finally:
            over.set()

    monkeypatch.setattr(store, "delete_session", delete_and_stand_still)
    proxy = await start_proxy(store=store)
    session = await proxy.control.create_session("t-1")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{proxy.url}/sessions/{session.trial_id}"
    leaving = asyncio.create_task(proxy.http.delete(url, headers=headers).__aenter__())
    await deleted.wait()
    if fault is None:
        leaving.cancel()
    else:
        assert (await leaving).status == status
    await over.wait()
    found = [(line["operation"], line["trial_id"], line["status"]) for line in lines]
    assert found == [("create", "t-1", 201), ("delete", "t-1", status)]
    await store.close()


def test_digest_is_the_one_of_the_documented_command() -> None:
    assert key_digest("test") == "9f86d081884c"
    assert key_digest("") is None


@pytest.mark.parametrize("level", get_args(LogLevel))
def test_lines_are_in_json_logs_of_every_level_only(
    monkeypatch: pytest.MonkeyPatch, level: LogLevel
) -> None:
    loggers = [logging.getLogger(name) for name in (None, CALLS, AUDIT)]
    levels = [logger.level for logger in loggers]
    monkeypatch.setattr(loggers[0], "handlers", [])
    try:
        for kind, expected in LOGGED:
            set_up(kind, level)
            assert loggers[-1].isEnabledFor(logging.INFO) == expected
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
