"""A real Chromium without a window, driven over its debugging protocol (CDP).

Everything that the browser complains about (errors of scripts, of the console, of the content
policy) is kept in `Tab.complaints`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from proxy.engines import guard

PROGRAM = shutil.which("chromium")
MISSING = None if PROGRAM else "chromium is not installed: apt-get install chromium"
WAIT_S = 240.0
"""Much longer than needed, for a machine on which much else runs."""
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
GRACE_S = 10
"""Seconds in which a browser ends by itself."""


class Chromium:
    """One browser. Each tab has cookies of its own."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(WAIT_S):
            return await answer

    async def tab(self, width: int = 1280, height: int = 860) -> Tab:
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        made = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        await tab.size(width, height)
        return tab

    async def close(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self._socket.send_json({"id": 0, "method": "Browser.close"})
        self._reading.cancel()

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if answer := self._answers.pop(data.get("id", 0), None):
                if "error" in data:
                    answer.set_exception(RuntimeError(data["error"]["message"]))
                else:
                    answer.set_result(data["result"])
            elif tab := self._tabs.get(data.get("sessionId", "")):
                tab.heard(data["method"], data["params"])


class Tab:
    """A page in the browser."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self._expected: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def next(self, method: str) -> asyncio.Future[dict[str, Any]]:
        """The parameters of the next event of this name."""
        return self._expected.setdefault(method, asyncio.get_running_loop().create_future())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if expected := self._expected.pop(method, None):
            expected.set_result(params)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", str(details)))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str([arg.get("value") for arg in params["args"]]))

    async def close(self) -> None:
        await self.call("Page.close")

    async def size(self, width: int, height: int, *, phone: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    async def colours(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression; that of a promise once it is kept."""
        done = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"]["exception"].get("description"))
        return done["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until an expression is true; the page is asked, however often it is loaded."""
        poll = f"""new Promise(resolve => {{
            const since = performance.now();
            const look = () => {{
                let found = false;
                try {{ found = !!({condition}); }} catch {{}}
                if (found || performance.now() - since > 5000) resolve(found);
                else setTimeout(look, 25);
            }};
            look();
        }})"""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(RuntimeError):  # the page was left meanwhile
                        if await self.evaluate(poll):
                            return
        except TimeoutError:
            text = await self.evaluate("document.body.innerText.slice(0, 3000)")
            raise AssertionError(f"{condition} was not true; {self.complaints}; {text}") from None

    async def text(self, selector: str = "body") -> str:
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    async def picture(self) -> bytes:
        """A PNG of what it shows."""
        done = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(done["data"])


def ended_with_its_test() -> Sequence[str]:
    """The beginning of a browser's command line, by which it also ends if its test is killed."""
    return sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(GRACE_S)


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Chromium]:
    """`folder`: for the browser's profile."""
    assert PROGRAM is not None
    process = await asyncio.create_subprocess_exec(
        *ended_with_its_test(),
        *(PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(WAIT_S):
            while not (found := re.search(rb"ws://\S+", await process.stderr.readline())):
                pass
        draining = asyncio.create_task(process.stderr.read())
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(found[0].decode(), max_msg_size=0) as socket,
        ):
            browser = Chromium(socket)
            yield browser
            await browser.close()
        draining.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
