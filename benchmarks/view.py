"""What the page in the browser costs: the time to open a large store, scrolling, and the proxy.

The store has copies of one recorded session of 128k tokens. Times are those of a real Chromium,
from the navigation to the rows on the screen. `--trace` writes a trace of the scrolling in
Chromium's own format. `python -m benchmarks.view` prints the tables of docs/notes/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.proxy.long_sessions import turn_body
from benchmarks.proxy.targets import Target, fake_vllm, ours
from proxy.extras.view.access import new_link
from proxy.store import open_store
from tests.proxy.extras.view.chromium import Chromium, Tab, chromium

TEMPLATE = "long-0"
TURNS = 112
COPIED = ("sessions", "turns", "answers", "deliveries")
VIEWS = {
    "Sessions": ("/sessions", "document.querySelectorAll('.sessions tbody tr').length >= 20"),
    "Trial of 112 turns": (
        f"/trial/{TEMPLATE}?turn={TURNS - 1}",
        "document.querySelectorAll('.message').length > 6",
    ),
    "Tokens of its last turn": (
        f"/tokens/{TEMPLATE}?turn={TURNS - 1}",
        "document.querySelectorAll('.flow .token').length > 9",
    ),
    "the same as a table": (
        f"/tokens/{TEMPLATE}?turn={TURNS - 1}&as=table",
        "document.querySelector('.token-table .p')",
    ),
    "Search (text, first page)": (
        "/search?text=turn+42",
        "document.querySelectorAll('.hits mark').length > 3",
    ),
}
SCROLL = """new Promise(done => {
    const box = document.querySelector('%s'), frames = [];
    let last = performance.now(), at = box.scrollTop;
    const step = (now) => {
        frames.push(now - last);
        last = now;
        at += %d;
        box.scrollTop = at;
        if (frames.length > %d) done(frames.slice(1)); else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
})"""
FRAMES = 300


async def record_session(target: Target) -> None:
    """One conversation that grows to 128k tokens."""
    messages: list[dict[str, Any]] = []
    url = target.url.replace("/s@S@/", f"/{TEMPLATE}/")
    async with aiohttp.ClientSession() as http:
        for turn in range(1, TURNS + 1):
            body = turn_body(messages, 0, turn)
            async with http.post(url, data=body) as response:
                answer = orjson.loads(await response.read())
            messages.append(answer["choices"][0]["message"])


def copy_session(store: Path, count: int) -> None:
    """Adds sessions with the same turns, each an hour older than the one before."""
    with sqlite3.connect(store) as database:
        for table in COPIED:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            changed = {
                "session_id": "'copy-' || :number",
                "key_hash": "randomblob(32)",
                "created_at": "created_at - 3600 * :number",
            }
            values = ", ".join(changed.get(column, column) for column in columns)
            copy = f"INSERT INTO {table} SELECT {values} FROM {table} WHERE session_id = :session"
            database.executemany(
                copy, ({"number": n, "session": TEMPLATE} for n in range(1, count))
            )


async def enter(browser: Chromium, target: Target, store: Path) -> Tab:
    """A tab that has opened the page with a link."""
    opened = await open_store(f"sqlite:///{store}")
    link = await new_link(opened.browser)
    await opened.close()
    tab = await browser.tab()
    await tab.open(f"{target.url.partition('/s@S@')[0]}/#link={link}")
    await tab.until("document.querySelector('header .dot.on')")
    return tab


async def opening_s(tab: Tab, place: str, ready: str) -> float:
    """Seconds from the navigation to the content, with nothing in the page's memory."""
    root = (await tab.evaluate("location.origin")) + "/"
    await tab.open("about:blank")
    await tab.open(f"{root}#{place}")
    await tab.until(ready)
    found = f"""new Promise(done => requestAnimationFrame(() => done(
        ({ready}) ? performance.now() : null)))"""
    seconds = await tab.evaluate(found)
    assert seconds is not None
    return float(seconds) / 1e3


async def frames_ms(tab: Tab, selector: str, pixels: int, trace: Path | None) -> list[float]:
    """The time of each frame while an element is scrolled by so many pixels per frame."""
    if trace is not None:
        await tab.call("Tracing.start", transferMode="ReturnAsStream")
    frames = await tab.evaluate(SCROLL % (selector, pixels, FRAMES))
    if trace is not None:
        await write_trace(tab, trace)
    return [float(frame) for frame in frames]


async def write_trace(tab: Tab, file: Path) -> None:
    complete = tab.next("Tracing.tracingComplete")
    await tab.call("Tracing.end")
    stream = (await complete)["stream"]
    with file.open("wb") as out:
        while True:
            piece = await tab.call("IO.read", handle=stream)
            data = piece["data"]
            out.write(base64.b64decode(data) if piece.get("base64Encoded") else data.encode())
            if piece["eof"]:
                break


async def cpu_share(target: Target, calls_per_s: float, seconds: float) -> float:
    """Share of a core that the proxy uses while it serves so many small calls per second."""
    before, begun = target.cpu_s(), time.perf_counter()
    calls = []
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as running:
        for number in range(round(calls_per_s * seconds)):
            calls.append(running.create_task(small_call(http, target, number)))
            await asyncio.sleep(max(0.0, begun + (number + 1) / calls_per_s - time.perf_counter()))
    assert all(call.result() == 200 for call in calls)
    return (target.cpu_s() - before) / (time.perf_counter() - begun)


async def small_call(http: aiohttp.ClientSession, target: Target, number: int) -> int:
    url = target.url.replace("@S@", f"small-{time.time_ns()}-{number % 8}")
    message = {"role": "user", "content": f"Look at {number}."}
    async with http.post(url, json={"model": "fake", "messages": [message]}) as response:
        await response.read()
        return response.status


async def open_views(tab: Tab, repeats: int) -> None:
    print("| view | median s | longest s |\n|---|---|---|")
    for name, (place, ready) in VIEWS.items():
        times = [await opening_s(tab, place, ready) for _ in range(repeats)]
        print(f"| {name} | {statistics.median(times):.2f} | {max(times):.2f} |", flush=True)


async def scroll(tab: Tab, trace: Path | None) -> None:
    print(
        "\n| scrolled | frames/s | median ms | p99 ms | frames over 50 ms |\n|---|---|---|---|---|"
    )
    for name, selector, pixels in (
        ("tokens as text", ".flow", 200),
        ("tokens as a table", ".token-table", 200),
        ("tokens as a table, fast", ".token-table", 20_000),
    ):
        view = "the same as a table" if "table" in name else "Tokens of its last turn"
        await opening_s(tab, *VIEWS[view])
        frames = await frames_ms(tab, selector, pixels, trace)
        trace = None
        print(
            f"| {name} | {1e3 / statistics.mean(frames):.0f} | {statistics.median(frames):.1f} | "
            f"{sorted(frames)[int(len(frames) * 0.99)]:.1f} | "
            f"{sum(frame > 50 for frame in frames)} of {len(frames)} |",
            flush=True,
        )


async def viewers(browser: Chromium, target: Target, store: Path, arguments: Any) -> None:
    """Alternates between no viewer and several, so that both see the same machine."""
    shares: dict[int, list[float]] = {0: [], arguments.viewers: []}
    for _ in range(arguments.repeats):
        shares[0].append(await cpu_share(target, arguments.calls, arguments.seconds))
        tabs = [await enter(browser, target, store) for _ in range(arguments.viewers)]
        shares[len(tabs)].append(await cpu_share(target, arguments.calls, arguments.seconds))
        for tab in tabs:
            assert await tab.evaluate("!!document.querySelector('header .dot.on')")
            assert not await tab.evaluate("document.hidden")
        for tab in tabs:
            await tab.close()
    alone, watched = (statistics.median(found) for found in shares.values())
    print(
        f"\nprocessor of the proxy at {arguments.calls:.0f} small calls/s: {alone:.1%} of a core, "
        f"with {arguments.viewers} pages open {watched:.1%}: "
        f"{(watched - alone) / arguments.viewers:.2%} per page"
    )


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    store = folder / "large.db"
    with fake_vllm() as upstream:
        with ours(upstream, folder, "--store", f"sqlite:///{store}") as target:
            await record_session(target)
        copy_session(store, arguments.sessions)
        print(f"store: {arguments.sessions} sessions, {store.stat().st_size / 1e6:.0f} MB\n")
        with ours(upstream, folder, "--store", f"sqlite:///{store}") as target:
            async with chromium(folder / "profile") as browser:
                tab = await enter(browser, target, store)
                await open_views(tab, arguments.repeats)
                await scroll(tab, arguments.trace)
                await tab.close()
                await viewers(browser, target, store, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.view", description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--viewers", type=int, default=4)
    parser.add_argument("--calls", type=float, default=50.0, help="small calls per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="per measurement")
    parser.add_argument("--trace", type=Path, help="writes a trace of the scrolling to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(arguments, Path(folder)))


if __name__ == "__main__":
    main()
