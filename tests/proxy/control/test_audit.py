"""The audit log: one line per change, with a digest of the key, and no line for reading."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from proxy.client import ProxyClient, ProxyClientError
from proxy.control.audit import key_digest
from proxy.logs import AUDIT, CALLS, JsonLines, LogKind, set_up
from proxy.records import Reward
from tests.proxy.conftest import ADMIN_KEY, RunningProxy

LEVELS: list[tuple[LogKind, int]] = [("text", logging.WARNING), ("json", logging.INFO)]


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


def test_digest_is_the_one_of_the_documented_command() -> None:
    assert key_digest("test") == "9f86d081884c"
    assert key_digest("") is None


def test_lines_are_in_json_logs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = [logging.getLogger(name) for name in (None, CALLS, AUDIT)]
    levels = [logger.level for logger in loggers]
    monkeypatch.setattr(loggers[0], "handlers", [])
    try:
        for kind, expected in LEVELS:
            set_up(kind, "info")
            assert loggers[-1].level == expected
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
