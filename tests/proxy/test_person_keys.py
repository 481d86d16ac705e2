"""Several people at one proxy, each with a key: what opens, and what does not, by every route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from yarl import URL

import proxy.cli
from proxy.app import build_app
from proxy.client import ProxyClient, ProxyClientError, SessionHandle
from proxy.config import load_config
from proxy.errors import ConfigurationError
from proxy.extras.learn.client import LearnClient
from proxy.extras.learn.section import TARGET
from proxy.person_keys import PersonKeys
from proxy.records import Origin
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import browser, show, tab
from tests.proxy.extras.view.test_learning import write

__all__ = ["browser", "tab"]

SECRET = "mauve-otter"
CHAT = "chat/completions"
FIRST_S = 2.0
"""Seconds in which a stream sends what it has."""
OPEN = {"GET /", "GET /health", "GET /openapi.json", "GET /ready", "GET /view/static/{name}"}
"""What anybody may read."""
LISTS = {
    *("GET /sessions", "POST /sessions", "GET /view/sessions", "GET /view/forks"),
    *("GET /view/search", "GET /view/live", "GET /view/state", "GET /view/decisions"),
    *("GET /learn/{policy}/state", "PUT /learn/{policy}/order", "POST /view/log_out"),
}
"""What a person may ask without naming a session: their handlers select what is the person's own. A
new one belongs here, with an attempt below that shows it."""


@dataclass
class Team:
    """A proxy with two people, each with a policy of their own."""

    proxy: RunningProxy
    keys: dict[str, str]
    folder: Path

    def client(self, name: str) -> ProxyClient:
        return ProxyClient(self.proxy.url, self.keys[name])

    async def session(self, name: str, trial_id: str | None = None, **more: Any) -> SessionHandle:
        """A session of one call, made with the person's key."""
        async with self.client(name) as person:
            made = await person.create_session(trial_id, **more)
        self.proxy.answers(f"{name} says {SECRET}.")
        said = [{"role": "user", "content": f"The word is {SECRET}, {name}."}]
        assert (await self.proxy.post(made, CHAT, {"messages": said}))[0] == 200
        said.append({"role": "user", "content": "Something else."})
        assert (await self.proxy.post(made, CHAT, {"messages": said[1:]}))[0] == 200
        return made


def settings(folder: Path) -> dict[str, Any]:
    recorders = [
        {"policy": name, "folder": str(folder / name), "only": only}
        for name, only in (("ann", {"person": "ann"}), ("bob", {"person": "bob"}), ("team", {}))
    ]
    return {
        "people": {"ann": folder / "ann.key", "bob": folder / "bob.key"},
        "extras": [{"target": TARGET, "settings": {"recorders": recorders}}],
    }


@pytest.fixture
async def team(start_proxy: StartProxy, tmp_path: Path) -> Team:
    proxy = await start_proxy(**settings(tmp_path))
    keys = {name: (tmp_path / f"{name}.key").read_text().strip() for name in ("ann", "bob")}
    return Team(proxy, keys | {"admin": ADMIN_KEY}, tmp_path)


def every_route(checkpoint: Path, folder: Path) -> list[tuple[str, str]]:
    """`(method, path)` of all that the application answers, but the calls of agents."""
    config = load_config(
        None,
        model=checkpoint,
        engines=[{"url": "http://127.0.0.1:9"}],
        store=f"sqlite:///{folder}/routes.db",
        admin_key=ADMIN_KEY,
        relay={"token": "a-token-of-32-characters-or-more"},
        **settings(folder),
    )
    found = set()
    for each in build_app(config).router.routes():
        assert each.resource is not None
        path = each.resource.canonical
        if not path.startswith("/v1/") and each.method != "HEAD" and path != "/{path}":
            found.add(("GET" if each.method == "*" else each.method, path))
    return sorted(found)


def requests(
    routes: list[tuple[str, str]], session: str, policy: str
) -> Iterator[tuple[str, str, str, dict[str, str], list[Any]]]:
    """`(name, method, path, query, bodies)` of attempts at each route to reach the session: with a
    query that names it, and with one that does not."""
    parts = {"trial_id": session.replace("/", "%2F"), "policy": policy, "number": "1"}
    query = {"turn": "0", "turns": "0", "place": "answer.text", "text": SECRET}
    query |= {"format": "messages", "policy": policy, "sha256": "0" * 64}
    bodies: list[Any] = [
        {},
        {"trial_id": session},
        {"from": {"session": session, "turn": 1}},
        {"key": "k", "value": 1.0},
        {"value": 0.0, "comment": "not mine", "tags": {"learn": "no"}},
        {"order": "freeze"},
    ]
    for method, path in routes:
        filled = re.sub(r"\{(\w+)\}", lambda found: parts.get(found[1], "x"), path)
        for given in (query, query | {"session": session}):
            yield f"{method} {path}", method, filled, given, bodies if method != "GET" else [None]


async def answered(
    proxy: RunningProxy, method: str, url: str, query: dict[str, str], body: Any, **more: Any
) -> tuple[int, str]:
    """Status and text of an answer; of a stream, what it sends at first."""
    data = None if body is None else orjson.dumps(body)
    headers = {"Content-Type": "application/json", **more.pop("headers", {})}
    address = str(URL(f"{proxy.url}{url}", encoded=True).update_query(query))
    request = proxy.http.request(method, address, data=data, headers=headers, **more)
    async with request as response:
        if response.content_type != "text/event-stream":
            return response.status, (await response.read()).decode(errors="replace")
        text = b""
        try:
            async with asyncio.timeout(FIRST_S):
                async for line in response.content:
                    text += line
        except TimeoutError:
            pass
        return response.status, text.decode(errors="replace")


@pytest.mark.parametrize("by", ["key", "cookie"])
async def test_no_route_shows_or_changes_a_session_of_another_person(
    team: Team, checkpoint: Path, tmp_path: Path, by: str
) -> None:
    mine = (await team.session("ann", "ann/one")).trial_id
    hidden = (await team.session("ann", "ann/hidden", metadata={"learn": "yes"})).trial_id
    await team.proxy.control.curate(hidden, comment=SECRET)
    write(tmp_path / "ann", [{"kind": "rollback", "number": 1, "by": "gate", "why": [SECRET]}])
    before = [await team.proxy.control.show(name) for name in (mine, hidden)]
    routes = every_route(checkpoint, tmp_path)
    shown: dict[str, set[str]] = {}
    for name in ("bob", "ann", "admin"):
        headers, cookies = {"Authorization": f"Bearer {team.keys[name]}"}, {}
        if by == "cookie":
            log_in = f"{team.proxy.url}/view/log_in"
            async with team.proxy.http.post(log_in, json={"secret": team.keys[name]}) as response:
                cookies = {key: each.value for key, each in response.cookies.items()}
            team.proxy.http.cookie_jar.clear()
            headers = {}
        shown[name] = set()
        for route, method, path, query, bodies in requests(routes, mine, "ann"):
            if name != "bob" and method != "GET":
                continue  # what the others may change, they would
            for body in bodies:
                status, text = await answered(
                    *(team.proxy, method, path, query, body), headers=headers, cookies=cookies
                )
                assert status < 500 or route.startswith("GET /view/run"), (name, route, text)
                if SECRET in text or "ann/hidden" in text:
                    shown[name].add(route)
                if name == "bob" and status < 400:
                    assert route in OPEN | LISTS | {"POST /view/log_in"}, (route, body, text)
    assert shown["bob"] == set()
    assert [await team.proxy.control.show(name) for name in (mine, hidden)] == before
    async with LearnClient(team.proxy.url, ADMIN_KEY) as admin:
        assert not (await admin.state("ann"))["frozen"]
    read = {"GET /view/session", "GET /view/turns", "GET /view/live", "GET /view/session/export"}
    read |= {"GET /view/sessions", "GET /view/search", "GET /view/decisions", "GET /view/text"}
    read |= {"GET /sessions", "GET /sessions/{trial_id}"} if by == "key" else set()
    assert shown["ann"] >= read
    assert shown["admin"] >= shown["ann"]


@pytest.mark.programs
@needs(MISSING)
async def test_a_person_works_in_the_page_on_own_sessions_alone(team: Team, tab: Tab) -> None:
    theirs = (await team.session("bob", "bob/one", metadata={"learn": "yes"})).trial_id
    mine = (await team.session("ann", "ann/one", metadata={"learn": "yes"})).trial_id
    for name in ("ann", "bob"):
        said = f"of {name}"
        write(
            team.folder / name, [{"kind": "rollback", "number": 1, "by": "engine", "why": [said]}]
        )
    await tab.open(team.proxy.url)
    await tab.until("document.querySelector('#secret')")
    await tab.evaluate(f"document.querySelector('#secret').value = {team.keys['ann']!r}")
    await tab.click("form button")
    await tab.until("document.querySelector('header .dot.on')")
    tab.complaints.clear()
    await tab.until("document.querySelectorAll('.view-now tbody tr').length > 1")
    assert "bob" not in await tab.text("main")
    await show(tab, "/learning", "document.querySelector('.decisions tbody tr')")
    assert "of ann" in await tab.text("main")
    assert "of bob" not in await tab.text("main")
    await show(tab, "/sessions", "document.querySelector('.sessions tbody tr')")
    assert mine in await tab.text("main")
    assert "bob" not in await tab.text("main")
    await tab.click(".thumbs button")
    await tab.until("document.querySelector('.thumbs [aria-pressed=true]')")
    found = "document.querySelectorAll('.hits li').length"
    await show(tab, f"/search?text={SECRET}", f"{found} > 0")
    assert "bob" not in await tab.text("main")
    assert all("403" in each for each in tab.complaints), tab.complaints  # the rules
    tab.complaints.clear()
    await show(tab, "/trial/bob%2Fone", "document.querySelector('.error')")
    assert SECRET not in await tab.text("main")
    assert [each["value"] for each in (await team.proxy.control.show(mine))["rewards"]] == [1.0]
    assert (await team.proxy.control.show(theirs))["rewards"] == []


async def test_a_person_sees_rates_and_deletes_own_sessions(team: Team) -> None:
    theirs = await team.session("bob")
    assert theirs.trial_id.startswith("bob/")
    async with team.client("ann") as ann, team.client("bob") as bob:
        made = await team.session("ann", metadata={"person": "bob", "topic": "till"})
        assert made.trial_id.startswith("ann/")
        for where, expected in (
            ({}, [made.trial_id]),
            ({"id_prefix": "a"}, [made.trial_id]),
            ({"id_prefix": "ann/"}, [made.trial_id]),
            ({"id_prefix": "bob/"}, []),
            ({"id_prefix": theirs.trial_id}, []),
        ):
            found = await ann.list_sessions(**where)
            assert [each["trial_id"] for each in found] == expected
        shown = await ann.show(made.trial_id)
        assert shown["metadata"] == {"person": "ann", "topic": "till"}
        await ann.curate(made.trial_id, value=1.0, tags={"topic": "sum"})
        with pytest.raises(ProxyClientError, match="only the administrator") as error:
            await ann.curate(made.trial_id, tags={"person": "bob"})
        assert error.value.status == 403
        branch = await ann.branch(Origin(made.trial_id, 1))
        assert branch.trial_id.startswith("ann/")
        await ann.complete(made.trial_id)
        assert [each["kind"] for each in await ann.past_events(made.trial_id)][-1] == "completed"
        for wrong in ("bob/mine", "mine", "ann", "annie/x"):
            with pytest.raises(ProxyClientError, match="begin with 'ann/'") as error:
                await ann.create_session(wrong)
            assert error.value.status == 404
        with pytest.raises(ProxyClientError) as error:
            await ann.branch(Origin(theirs.trial_id, 1))
        assert error.value.status == 404
        with pytest.raises(ProxyClientError, match="policies") as error:
            await ann.create_session(policies={"": "bob-1"})
        assert error.value.status == 403
        await ann.delete(branch.trial_id)
        await ann.delete(made.trial_id)
        assert await ann.list_sessions() == []
        assert [each["trial_id"] for each in await bob.list_sessions()] == [theirs.trial_id]
    everything = await team.proxy.control.list_sessions()
    assert [each["trial_id"] for each in everything] == [theirs.trial_id]


async def test_a_persons_key_is_no_key_of_an_agent(team: Team) -> None:
    made = await team.session("ann")
    stolen = SessionHandle(
        made.trial_id, team.keys["bob"], made.base_url, made.anthropic_base_url, made.expires_at
    )
    for key in (stolen, made.__class__(**{**vars_of(made), "api_key": team.keys["ann"]})):
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await team.proxy.post(key, CHAT, body))[0] == 401


def vars_of(made: SessionHandle) -> dict[str, Any]:
    return {name: getattr(made, name) for name in SessionHandle.__dataclass_fields__}


async def test_a_key_that_is_removed_ends_its_cookies_and_a_new_one_opens(team: Team) -> None:
    await team.session("ann")
    state = f"{team.proxy.url}/view/sessions"
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        given = {"secret": team.keys["ann"]}
        async with browser.post(f"{team.proxy.url}/view/log_in", json=given) as response:
            assert response.status == 200
        async with browser.get(state) as response:
            assert len((await response.json())["sessions"]) == 1
        (team.folder / "ann.key").write_text("another-key-of-ann\n")
        async with browser.get(state) as response:
            assert response.status == 401
    async with ProxyClient(team.proxy.url, "another-key-of-ann") as ann:
        assert len(await ann.list_sessions()) == 1
    with pytest.raises(ProxyClientError, match="401"):
        async with team.client("ann") as former:
            await former.list_sessions()


async def test_personal_adapters_and_one_of_the_team_on_one_engine(team: Team) -> None:
    proxy, names = team.proxy, ("ann", "bob", "team")
    proxy.engine.adapters |= {f"{name}@1": proxy.engine.script for name in names}
    for name in names:
        key = (team.folder / name / "learner.key").read_text().strip()
        async with LearnClient(proxy.url, key) as learner:
            await learner.publish_adapter(name, 1, f"{name}@1")
            await learner.assign(name, stable=1)
    ids = {}
    for name in ("ann", "bob", "admin"):
        made = await team.session(name, metadata={"learn": "yes", "person": "nobody"})
        session, turns = await proxy.control.get_turns(made.trial_id)
        own = name if name != "admin" else "team"
        assert {turn.policy for turn in turns} == {session.policy_of("")} == {f"{own}-1"}
        await proxy.control.complete(made.trial_id)
        ids[own] = made.trial_id
    for name in names:
        key = (team.folder / name / "learner.key").read_text().strip()
        async with LearnClient(proxy.url, key) as learner:
            assert [each["trial_id"] for each in await learner.readable(name)] == [ids[name]]
    async with LearnClient(proxy.url, team.keys["ann"]) as ann:
        assert (await ann.order("ann", "freeze"))["frozen"]
        assert (await ann.state("ann"))["stable"] == 1
        for other in ("bob", "team", "none"):
            for call in (ann.state(other), ann.order(other, "freeze")):
                with pytest.raises(ProxyClientError) as error:
                    await call
                assert error.value.status == 404
        with pytest.raises(ProxyClientError) as error:
            await ann.readable("ann")
        assert error.value.status == 401


async def test_commands_with_a_persons_key(
    team: Team, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = (await team.session("ann", "ann/one")).trial_id
    theirs = (await team.session("bob", "bob/one")).trial_id
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY_FILE", str(team.folder / "ann.key"))

    async def said(code: int, *words: str) -> str:
        argv = ["sessions", *words, "--url", team.proxy.url]
        assert await asyncio.to_thread(proxy.cli.main, argv) == code
        return "".join(capsys.readouterr())

    listed = await said(0, "list")
    assert mine in listed
    assert "The word is" in listed
    assert theirs not in listed
    found = await said(0, "list", "--search", SECRET)
    assert mine in found
    assert theirs not in found
    assert SECRET in await said(0, "show", mine)
    await said(0, "rate", mine, "up", "--comment", "well done")
    assert "well done" in await said(0, "show", mine)
    await said(0, "tag", mine, "topic=till")
    for words in (("show",), ("rate", "up"), ("tag", "a=b"), ("delete",)):
        told = await said(2, words[0], theirs, *words[1:])
        assert SECRET not in told
    await said(0, "delete", mine)
    assert "ann/" not in await said(0, "list")
    left = await team.proxy.control.list_sessions()
    assert [each["trial_id"] for each in left] == [theirs]
    assert left[0]["rewards"] == []


def test_files_of_keys_are_made_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    made = PersonKeys({"ann": tmp_path / "ann", "bob": tmp_path / "bob"})
    assert (tmp_path / "ann").stat().st_mode & 0o777 == 0o600
    key = (tmp_path / "ann").read_text().strip()
    assert made.person_of(key) == "ann"
    assert made.person_of("") == made.person_of("other") == ""
    (tmp_path / "eve").write_text(f"{key}\n")
    (tmp_path / "empty").write_text("\n")
    for files, why in (
        ({"ann": tmp_path / "ann", "eve": tmp_path / "eve"}, "has the key of ann"),
        ({"ann": tmp_path / "empty"}, "is empty"),
        ({"ann": tmp_path}, "cannot be used"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            PersonKeys(files)


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".", "a b", "é"])
def test_names_that_cannot_begin_an_id_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="people"):
        load_config(None, people={name: "keys/x"})


def test_sessions_without_keys_are_not_for_several_people() -> None:
    with pytest.raises(ConfigurationError, match="auto_create"):
        load_config(None, people={"ann": "ann.key"}, sessions={"auto_create": True})
