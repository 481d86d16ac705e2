"""What every extra sees of the proxy's life; without any of them, the proxy serves agents."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy.commands.route_reference import reference
from proxy.config import SECTIONS
from proxy.control.door import json_answer
from proxy.errors import RequestError
from proxy.extra import Core, Extra
from proxy.extra_registry import EXTRAS, Registered
from proxy.http.route import Who, route, routes_of
from proxy.records import Turn
from tests.proxy.conftest import ADMIN_KEY, StartProxy, starting_proxies

BODY = {"messages": [{"role": "user", "content": "Hi."}]}
LIFE: list[str] = []
ROOT = Path(__file__).parents[2]
ALONE = """
import asyncio, sys
sys.modules["proxy.extras"] = None
from proxy import extra_registry
extra_registry.EXTRAS.clear()
extra_registry.COMMANDS = ()
extra_registry.BINARY_ROUTE_CLIENT = extra_registry.BINARY_ROUTE_SERVER = None
extra_registry.PDF_PAGES = None
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from proxy.app import build_app
from proxy.cli import main
from proxy.config import load_config
from proxy.errors import ConfigurationError

async def ask():
    engines = [{"url": "http://127.0.0.1:9"}]
    store = f"sqlite:///{sys.argv[1]}/alone.db"
    given = {"model": sys.argv[1], "engines": engines, "store": store, "admin_key": "k"}
    async with TestServer(build_app(load_config(**given))) as server, ClientSession() as http:
        async with http.get(server.make_url("/view/state")) as response:
            return response.status

print(asyncio.run(ask()), end=" ")
try:
    load_config(relay={"token": "t"})
except ConfigurationError as error:
    print(error.message)
"""


class Applause(Extra):
    """Counts turns, and refuses sessions with more than one call at a time."""

    async def open(self, core: Core) -> None:
        self.core = core
        self._turns = core.metrics.counter("applause", "Turns that were applauded")
        LIFE.append("open")

    @route("GET", "/applause/{name}", summary="How much there was")
    async def _show(self, request: web.Request) -> web.Response:
        return json_answer({"for": request.match_info["name"]})

    @route("GET", "/applause", summary="Whether there may be any", who=Who.ANYONE)
    async def _may(self, request: web.Request) -> web.Response:
        return json_answer({})

    async def on_create(self, limits: Mapping[str, Any]) -> None:
        if limits.get("max_concurrent_calls", 1) > 1:
            raise RequestError("limits.max_concurrent_calls: one at a time")

    def on_turn(self, session_id: str, turn: Turn, model: str) -> None:
        self._turns.inc()
        LIFE.append(f"turn {turn.index} of {session_id} by {model}")

    async def on_end(self, session_id: str) -> None:
        LIFE.append(f"end of {session_id}")

    async def stop(self) -> None:
        LIFE.append("stop")

    async def close(self) -> None:
        await self.core.store.get_policies()  # the store is still open
        LIFE.append("close")


Applause.routes = routes_of(Applause)


async def test_life_of_an_extra(
    checkpoint: Any, rendering: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    LIFE.clear()
    line = Registered(f"{__name__}:Applause", always=True)
    monkeypatch.setitem(EXTRAS, "applause", line)
    async with starting_proxies(checkpoint, rendering, tmp_path) as start:
        proxy = await start()
        session = await proxy.control.create_session("t")
        assert (await proxy.post(session, "chat/completions", BODY | {"model": "m"}))[0] == 200
        await proxy.control.complete("t")
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {ADMIN_KEY}"}, 200)):
            async with proxy.http.get(proxy.url + "/applause/all", headers=headers) as response:
                assert response.status == status
            async with proxy.http.get(proxy.url + "/applause", headers=headers) as response:
                assert response.status == 200
        async with proxy.http.get(proxy.url + "/metrics", headers=headers) as response:
            assert "agentic_proxy_applause_total 1.0" in await response.text()
        async with proxy.http.get(proxy.url + "/openapi.json") as response:
            assert "/applause/{name}" in (await response.json())["paths"]
        with pytest.raises(Exception, match="one at a time"):
            await proxy.control.create_session("u", limits={"max_concurrent_calls": 2})
    assert LIFE == ["open", "turn 0 of t by m", "end of t", "stop", "close"]


@pytest.mark.parametrize("name", EXTRAS)
async def test_proxy_serves_agents_without_an_extra(
    name: str, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(EXTRAS, name)
    proxy = await start_proxy()
    session = await proxy.control.create_session("t")
    assert (await proxy.post(session, "chat/completions", BODY))[0] == 200
    await proxy.control.complete("t")
    recorded, turns = await proxy.control.get_turns("t")
    assert (recorded.status, len(turns)) == ("completed", 1)


def test_every_section_of_an_extra_is_a_key_of_the_configuration() -> None:
    assert {name for name, each in EXTRAS.items() if each.section is not None} == {*SECTIONS}


def test_importing_the_application_loads_no_extra() -> None:
    code = "import sys, proxy.app\nprint(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = done.stdout.split()
    assert "proxy.routing.router" in loaded
    assert [name for name in loaded if name.startswith("proxy.extras.")] == []


def test_the_core_alone_starts_and_refuses_sections_of_extras(checkpoint: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(checkpoint)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout == "404 relay: this proxy is installed without this extra\n", done.stderr


def test_page_of_requests_is_up_to_date_with_their_declarations() -> None:
    command = "python -m proxy.commands.route_reference > docs/routes.md"
    page = (ROOT / "docs" / "routes.md").read_text()
    assert page == reference(), f"generate it again: {command}"
    own = "; a person, for own sessions"
    assert f"| `POST /sessions/{{trial_id}}/rewards` | the admin key{own} |" in page
    assert f"| `GET /view/state` | a reader of the page{own} |" in page
    assert "| `GET /health` | anyone |" in page
