"""`agentic-proxy view` and `view-key` of `proxy.extras.view`, as processes."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import aiohttp
import pytest

from proxy.cli import main
from proxy.store import open_store
from tests.proxy.store.test_conformance import a_session, an_intent, answered


@pytest.fixture
async def store_file(tmp_path: Path) -> Path:
    """A store with one session."""
    store = await open_store(f"sqlite:///{tmp_path}/s.db")
    await store.create_session(a_session("recorded"))
    await store.begin_turn(an_intent("recorded"))
    await store.commit_turn(answered(an_intent("recorded")))
    await store.close()
    return tmp_path / "s.db"


@pytest.mark.programs
async def test_view_shows_a_store_after_the_fact(store_file: Path) -> None:
    command = [sys.executable, "-m", "proxy", "view", str(store_file)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    printed = (await process.stdout.readline()).decode()
    said = re.fullmatch(r"(http\S+) \(the link in (\S+) opens it once, within 10 .*\)\n", printed)
    assert said, printed  # it is no terminal
    assert Path(said[2]).stat().st_mode & 0o077 == 0
    link = Path(said[2]).read_text()
    found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/#link=(\S+)\n", link)
    assert found, link
    assert found[2] not in printed
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(found[1], cookie_jar=jar) as http:
        async with http.get("/view/sessions") as response:
            assert response.status == 401
        async with http.post("/view/log_in", json={"secret": found[2]}) as response:
            assert response.status == 200
        async with http.post("/view/log_in", json={"secret": found[2]}) as response:
            told = (await response.json())["error"]["message"]
        assert "agentic-proxy view-key create NAME --store URL" in told  # the link is used up
        made = [*command[:3], "view-key", "create", "ana", "--store", str(store_file)]
        key = (await (await asyncio.create_subprocess_exec(*made, stdout=-1)).communicate())[0]
        async with http.post("/view/log_in", json={"secret": key.split()[0].decode()}) as response:
            assert response.status == 200
        async with http.get("/view/sessions") as response:
            (session,) = (await response.json())["sessions"]
        async with http.get("/view/tokens?session=recorded&turn=0") as response:
            tokens = await response.json()
        async with http.get("/view/live") as feed:  # an open stream does not keep it from ending
            assert (await feed.content.readline()).startswith(b"id: ")
            process.terminate()
            assert await process.wait() == 0
    assert (session["id"], session["turns"]) == ("recorded", 1)
    assert (tokens["ids"], tokens["texts"]) == ([1, 2, 2**31 - 1, 5, 6], None)


@pytest.mark.parametrize("port", ["65536", "-1", "http"])
def test_port_that_cannot_be_is_refused_in_one_line(
    port: str, store_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["view", str(store_file), "--port", port])
    assert refused.value.code == 2
    said = f"argument --port: {port!r}: give a port, 1 to 65535, or 0: any free"
    assert said in capsys.readouterr().err


def test_keys_are_made_listed_and_revoked(
    store_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(store_file)]
    assert main(["view-key", "create", "ana", *store]) == 0
    key = capsys.readouterr().out.splitlines()[0]
    assert len(key) > 40
    assert main(["view-key", "create", "ana", *store]) == 2
    assert "a key 'ana' exists" in capsys.readouterr().err
    assert main(["view-key", "list", *store]) == 0
    listed = capsys.readouterr().out
    assert "ana" in listed
    assert key not in listed
    assert main(["view-key", "revoke", "ana", *store]) == 0
    assert main(["view-key", "revoke", "ana", *store]) == 2
    assert "there is no key 'ana'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["empty"], "is not a run's folder: it has no config.yaml"),
        (["run"], "the run has no sessions of its own"),
        (["one.db", "two.db"], "the page shows one store, but one.db, two.db"),
        (["one.db", "--store", "two.db"], "the page shows one store, but one.db, two.db"),
        (["run", "other/run"], "have the same name 'run'"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "run", "other/run"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("run", "other/run"):
        (tmp_path / name / "config.yaml").write_text("{}")
    assert main(["view", *given]) == 2
    assert said in capsys.readouterr().err
