"""JSON logs have one object per line and one line per call, and contain no secret."""

from __future__ import annotations

import logging
from typing import Any

import orjson
import pytest

from proxy.logs import CALLS, JsonLines
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
