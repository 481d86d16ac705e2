"""`agentic-proxy top`: what a proxy does at this moment, in a terminal.

It reads what the page in the browser reads (`/view/live`). Invariant: when the command ends, also
by Ctrl-C, the terminal is as it was, and nothing that agents or models wrote controls it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from argparse import Namespace
from contextlib import aclosing
from typing import Any, Literal, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxy.client import ProxyClient, ProxyClientError
from proxy.commands.activity import ActiveSession, Activity
from proxy.commands.run import running
from proxy.commands.terminal import one_line
from proxy.config import load_config
from proxy.errors import ConfigurationError

REFRESH_S = 1.0
RECONNECT_S = 2.0
ERRORS = 5
SHOWN_SESSIONS = 50
FRAME_LINES = 9
"""Lines of the screen besides the rows of the tables."""
WIDE, MEDIUM = 110, 70
"""Widths in characters from which on more columns are shown."""
WHOLE_LINES = 100_000
"""Width where nothing is cut, for programs that read the output."""


def top(arguments: Namespace) -> int:
    """Shows the proxy until Ctrl-C, or once. Returns the exit code."""
    given = {} if arguments.store is None else {"store": arguments.store}
    config = load_config(arguments.config, **given)
    once = arguments.once or not Console().is_terminal
    with running(arguments, config, may_start=False) as client:
        return asyncio.run(_once(client) if once else _follow(client))


async def _once(client: ProxyClient) -> int:
    activity = Activity()
    async with client, aclosing(client.watch()) as happenings:
        try:
            async for happening in happenings:
                activity.take(happening)
                if activity.state is not None:
                    break
        except ProxyClientError as error:
            raise ConfigurationError(str(error)) from error
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WHOLE_LINES)
    console.print(picture(activity, time.time(), width=console.width, rows=SHOWN_SESSIONS))
    return 0


async def _follow(client: ProxyClient) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    shown = _Screen(client)
    reading = asyncio.create_task(shown.read())
    ending: list[asyncio.Task[Any]] = [reading, asyncio.create_task(stop.wait())]
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not any(task.done() for task in ending):
            live.update(shown.picture(console), refresh=True)
            await asyncio.wait(ending, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED)
    for task in ending:
        task.cancel()
    await asyncio.wait(ending)
    await client.close()
    if not reading.cancelled():
        await reading
    return 0


class _Screen:
    """What is on the screen, and the connection to the proxy."""

    def __init__(self, client: ProxyClient) -> None:
        self._client = client
        self._activity = Activity()
        self._trouble = "connecting …"

    async def read(self) -> NoReturn:
        """Follows the proxy, also after it has restarted.

        Raises:
            ConfigurationError: the proxy refuses the key, or has no such page.
        """
        position = ""
        while True:
            try:
                async for happening in self._client.watch(position):
                    self._activity.take(happening)
                    position, self._trouble = happening.position, ""
                self._trouble = "the proxy has stopped; waiting for it"
            except ProxyClientError as error:
                if 400 <= error.status < 500 and error.status != 429:
                    raise ConfigurationError(str(error)) from error
                self._trouble = f"{error}; trying again"
            await asyncio.sleep(RECONNECT_S)

    def picture(self, console: Console) -> RenderableType:
        rows = max(1, console.height - FRAME_LINES - ERRORS)
        shown = picture(self._activity, time.time(), width=console.width, rows=rows)
        if not self._trouble:
            return shown
        return Group(Text(one_line(self._trouble), "red", no_wrap=True, overflow="ellipsis"), shown)


def picture(activity: Activity, now: float, *, width: int, rows: int) -> Group:
    """The screen at the Unix time `now`, with at most `rows` rows of engines and sessions."""
    engines = [] if activity.state is None else activity.state["engines"]
    errors = activity.errors(now)
    parts: list[RenderableType] = [_rates(activity, now, len(errors))]
    parts += [_engines(engines[:rows], width), Text()]
    left = max(1, rows - len(engines))
    parts.append(_sessions(activity.sessions(now)[:left], width, now))
    if errors:
        parts += [Text(), _errors(errors[:ERRORS], now)]
    return Group(*parts)


def _rates(activity: Activity, now: float, errors: int) -> Text:
    calls, tokens = activity.rates(now)
    open_turns = activity.running(now)
    state: dict[str, Any] = activity.state or {}
    busy = sum(now - session.at < 60 for session in activity.sessions(now))
    text = Text(no_wrap=False).append(
        f"{calls:.1f} calls/s  {tokens:.0f} tokens/s  {len(open_turns)} running"
    )
    if open_turns:
        text.append(f" (the oldest {_duration(now - open_turns[0]['started_at'])})")
    text.append(f"  {state.get('waiting', 0)} waiting  {busy} active sessions")
    text.append(f"  {errors} refused", "red" if errors else "")
    if state.get("paused"):
        text.append("\nthe engines are paused: calls wait", "bold yellow")
    return text


def _engines(engines: list[dict[str, Any]], width: int) -> Table:
    table = _table("engine", "state", ">calls", ">queued", ">cache", ">hits", ">version")
    if width >= WIDE:
        table.add_column("model", no_wrap=True, overflow="ellipsis")
    for engine in engines:
        details = engine["details"]
        healthy = engine["healthy"]
        row: list[str | Text] = [
            Text(one_line(engine["name"])),
            Text("healthy" if healthy else "failed", "green" if healthy else "red"),
            str(engine["in_flight"]),
            str(details.get("queued", "-")),
            _share(details.get("cache_used")),
            _share(details.get("cache_hits")),
            str(engine["version"]),
            Text(one_line(engine["model"] or "-")),
        ]
        table.add_row(*row[: len(table.columns)])
    return table


def _sessions(sessions: list[ActiveSession], width: int, now: float) -> Table:
    columns = ["session", "state", ">calls", ">tokens", ">last"]
    columns += [">turn", ">took"] if width >= MEDIUM else []
    columns += ["fork", "agent"] if width >= WIDE else []
    table = _table(*columns)
    for session in sessions:
        last = session.last
        state = "running" if session.running else last["status"]
        row: list[str | Text] = [
            Text(one_line(session.session_id)),
            Text(state, "green" if session.running else "red" if state == "cut" else ""),
            str(session.calls),
            str(session.sampled_tokens),
            _duration(now - session.at),
            str(last["index"]),
            _duration(last["duration_s"]),
            last["fork"] or "-",
            Text(one_line(last["agent"] or "-")),
        ]
        table.add_row(*row[: len(columns)])
    return table


def _errors(errors: list[dict[str, Any]], now: float) -> Table:
    table = _table("refused", ">status", ">last", "message")
    for event in errors:
        message = event.get("message") or event.get("code") or ""
        table.add_row(
            Text(one_line(event["session_id"])),
            Text(one_line(str(event.get("status", "?"))), "red"),
            _duration(now - event["at"]),
            Text(one_line(str(message))),
        )
    return table


def _table(*columns: str) -> Table:
    """`>` before a column's name: its values are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        name = column.removeprefix(">")
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _duration(seconds: float | None) -> str:
    """Example: "3.2s", "12m", "5.0h" """
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 100:
        return f"{seconds:.1f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
