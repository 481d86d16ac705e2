"""`agentic-proxy top`: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from proxy.cli import main
from proxy.client import Happening
from proxy.commands.activity import KEPT, Activity
from proxy.commands.terminal import visible
from proxy.commands.top import picture
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.extras.view.recording import HOSTILE, call, user

NOW = 1_780_000_000.0


def a_head(session: str, index: int = 0, **more: Any) -> dict[str, Any]:
    """A turn that ended two seconds before NOW."""
    head: dict[str, Any] = {"session": session, "index": index, "status": "done", "sampled": 100}
    head |= {"fork": None, "agent": None, "started_at": NOW - 3, "duration_s": 1.0}
    return head | more


def an_engine(name: str, **more: Any) -> dict[str, Any]:
    engine = {"name": name, "healthy": True, "in_flight": 2, "version": 7, "model": "m"}
    return engine | {"details": {"queued": 1, "cache_used": 0.5}} | more


def seen(engines: list[dict[str, Any]] | None = None, **news: Any) -> Activity:
    activity = Activity()
    empty: dict[str, Any] = {"begun": [], "answered": [], "events": []}
    activity.take(Happening("1.1.1", news=empty | news))
    state = {"engines": engines or [], "paused": False, "waiting": 3}
    activity.take(Happening("1.1.1", state=state))
    return activity


def printed(activity: Activity, width: int = 200, rows: int = 50) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(picture(activity, NOW, width=width, rows=rows))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_rates_engines_sessions_and_errors_are_shown() -> None:
    running = a_head("busy", 4, status="open", sampled=0, started_at=NOW - 5, duration_s=None)
    answered = [a_head("busy", 3), a_head("idle", 0, started_at=NOW - 300, fork="edited")]
    refused = {"kind": "refused", "session_id": "idle", "status": 400, "at": NOW - 60}
    engines = [an_engine("one"), an_engine("two", healthy=False, details={})]
    activity = seen(
        engines, begun=[running], answered=answered, events=[refused | {"message": "too long"}]
    )
    lines = printed(activity)
    columns = ["engine", "state", "calls", "queued", "cache", "hits", "version"]
    assert lines[0] == (
        "0.1 calls/s  10 tokens/s  1 running (the oldest 5.0s)  3 waiting  1 active sessions"
        "  1 refused"
    )
    assert lines[1].split()[:7] == columns
    assert lines[2].split() == ["one", "healthy", "2", "1", "50%", "-", "7", "m"]
    assert lines[3].split() == ["two", "failed", "2", "-", "-", "-", "7", "m"]
    assert lines[6].split() == ["busy", "running", "2", "100", "2.0s", "3", "1.0s", "-", "-"]
    assert lines[7].split() == ["idle", "done", "1", "100", "5m", "0", "1.0s", "edited", "-"]
    assert lines[10].split() == ["idle", "400", "60.0s", "too", "long"]


@pytest.mark.parametrize("width", [20, 40, 69, 80, 120])
def test_every_line_fits_the_terminal(width: int) -> None:
    answered = [a_head("a/very/long/name/of/a/session" * 4, agent="x" * 99, fork="compaction")]
    refused = {"kind": "refused", "session_id": "s" * 99, "at": NOW, "message": "m" * 999}
    lines = printed(
        seen([an_engine("n" * 99, model="m" * 99)], answered=answered, events=[refused]), width
    )
    assert max(map(len, lines)) <= width


def test_rows_are_limited_to_the_height_of_the_terminal() -> None:
    activity = seen([an_engine("e")], answered=[a_head(f"s{n}") for n in range(100)])
    rows = [line for line in printed(activity, rows=6) if re.match(r"s\d", line)]
    assert len(rows) == 5


def test_memory_is_bounded() -> None:
    activity = Activity()
    for number in range(3 * KEPT):
        head = a_head("s", number, status="open", duration_s=None)
        news = {"begun": [head], "answered": [], "events": []}
        activity.take(Happening(str(number), news=news))
    assert len(activity.running(NOW)) == KEPT
    assert activity.running(NOW)[-1]["index"] == 3 * KEPT - 1


def test_controls_are_made_visible() -> None:
    shown = visible(HOSTILE + "\ud800\x9b31m\xad\U000e0041")
    assert "␛[31mred␛[0m" in shown
    assert "⟨U+202E⟩gnp.exe" in shown
    assert "⟨U+D800⟩⟨U+009B⟩31m⟨U+00AD⟩⟨U+E0041⟩" in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    assert "عربي" in shown
    agent = seen(answered=[a_head("s", agent="\x1b]0;title\x07\n\x1b[2J")])
    assert "␛]0;title␇↵␛[2J" in "\n".join(printed(agent))


async def test_once_prints_a_plain_table_of_a_running_proxy(
    proxy: RunningProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "team/" + "long-name/" * 15 + "1"
    session = await proxy.session(trial_id=name)
    await call(proxy, session, [user("Hi.")])
    command = ["top", "--once", "--url", proxy.url]
    assert await asyncio.to_thread(main, command) == 2
    assert "admin key" in capsys.readouterr().err
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", ADMIN_KEY)
    assert await asyncio.to_thread(main, command) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    row = next(line.split() for line in out.splitlines() if line.startswith("team/"))
    assert row[:3] == [name, "done", "1"]
    assert any(line.split()[1:2] == ["healthy"] for line in out.splitlines())


def test_proxy_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 2
    assert "no proxy answers at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.programs
async def test_screen_follows_the_proxy_and_ctrl_c_restores_the_terminal(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session(trial_id="seen-on-the-screen")
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "top", "--url", proxy.url),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY, "TERM": "xterm", "COLUMNS": "90"},
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = b""

    async def until(text: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 120
        while text not in shown:
            assert time.monotonic() < deadline, shown
            try:
                shown += os.read(ours, 65536)
            except BlockingIOError:
                await asyncio.sleep(0.02)

    await until(b"calls/s")
    await call(proxy, session, [user("Hi.")])
    await until(b"seen-on-the-screen")
    process.send_signal(signal.SIGINT)
    await until(b"\x1b[?1049l")  # leaves the alternate screen
    assert await process.wait() == 0
    assert shown.index(b"\x1b[?1049h") < shown.index(b"seen-on-the-screen")
    assert b"Traceback" not in shown
    os.close(ours)
