"""JSON logs have one object per line and one line per call, and contain no secret."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.machine.logs import CALLS, JsonLines, LogKind, LogLevel, set_up
from tests.proxy.conftest import ADMIN_KEY, StartProxy

SAID = "a word that only the agent knows"


@pytest.fixture
def lines() -> Any:
    """The parsed lines that are logged during the test."""
    found: list[dict[str, Any]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = JsonLines().format(record)
            assert "\n" not in text
            found.append(orjson.loads(text))

    handler, root, calls = Keep(), logging.getLogger(), logging.getLogger(CALLS)
    levels = root.level, calls.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    calls.setLevel(logging.INFO)
    yield found
    root.removeHandler(handler)
    root.setLevel(levels[0])
    calls.setLevel(levels[1])


async def test_every_call_is_logged_and_no_line_contains_a_secret(
    start_proxy: StartProxy, lines: list[dict[str, Any]]
) -> None:
    proxy = await start_proxy()
    session = await proxy.session()
    body = {"messages": [{"role": "user", "content": SAID}]}
    assert (await proxy.post(session, "chat/completions", body))[0] == 200
    events = await proxy.events(session, "messages", {**body, "stream": True, "max_tokens": 9})
    assert events
    assert (await proxy.post(session, "responses", {"input": [{"role": SAID}]}))[0] == 400
    assert (await proxy.post(session, "messages", body, Authorization="Bearer x"))[0] == 401
    calls = [line for line in lines if line["logger"] == CALLS]
    assert [(c["dialect"], c["status"], c["trial_id"]) for c in calls] == [
        ("chat", 200, session.trial_id),
        ("messages", 200, session.trial_id),
        ("responses", 400, session.trial_id),
        ("messages", 401, None),
    ]
    assert [c.get("call_id") for c in calls[:2]] == [f"{session.trial_id}#{n}" for n in (0, 1)]
    assert [c.get("stream") for c in calls] == [False, True, None, None]
    assert all(c["duration_s"] >= 0 for c in calls)
    assert calls[2]["param"] == "input[0].role"
    for secret in (session.api_key, ADMIN_KEY, SAID):
        assert secret not in orjson.dumps(lines).decode()


def test_exception_is_logged_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "it failed", None, info)
    text = JsonLines().format(record)
    assert "\n" not in text
    assert orjson.loads(text)["exception"].endswith("two\nlines")


def test_line_with_half_a_character_is_logged() -> None:
    """Such as what an agent's server said in an error."""

    class Value:
        def __str__(self) -> str:
            return "value \ud800"

    error = ValueError("said \ud800")
    given = {"msg": "it \udfff", "exc_info": (type(error), error, None), "fields": {"a": Value()}}
    line = orjson.loads(JsonLines().format(logging.makeLogRecord(given)))
    assert line["message"] == "it ?"
    assert line["exception"] == "ValueError: said ?"
    assert line["a"] == "value ?"


@pytest.mark.parametrize(
    ("kind", "level", "root", "calls"),
    [
        ("text", "info", logging.INFO, logging.WARNING),
        ("text", "error", logging.ERROR, logging.ERROR),
        ("json", "debug", logging.DEBUG, logging.INFO),
        ("json", "warning", logging.WARNING, logging.WARNING),
    ],
)
def test_level_bounds_every_message_and_calls_are_info(
    monkeypatch: pytest.MonkeyPatch, kind: LogKind, level: LogLevel, root: int, calls: int
) -> None:
    logger, of_calls = logging.getLogger(), logging.getLogger(CALLS)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(of_calls, "level", of_calls.level)
    set_up(kind, level)
    assert (logger.level, of_calls.level) == (root, calls)


def test_level_is_a_key_a_flag_and_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_LOG_LEVEL", "debug")
    assert load_config(None, model=tmp_path).log_level == "debug"
    assert load_config(None, model=tmp_path, log_level="error").log_level == "error"
    monkeypatch.setenv("AGENTIC_PROXY_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="log_level"):
        load_config(None, model=tmp_path)
