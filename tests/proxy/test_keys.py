"""A file of keys: several are valid at a time, and they are replaced without a restart."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from proxy.keys import KeyFile, lines
from tests.proxy.conftest import ADMIN_KEY, StartProxy


def test_every_line_is_a_key_and_the_first_is_for_programs(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\n new \nold\n\n")
    keys = KeyFile(path)
    assert keys.accepts("new")
    assert keys.accepts("old")
    assert not any(map(keys.accepts, ("", " ", "ne", "new\nold")))
    assert lines(path)[0] == "new"


def test_changed_file_is_read_again_and_an_unusable_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = KeyFile(path, ["at start"])
    assert keys.accepts("at start")
    path.write_text("first\n")
    assert keys.accepts("first")
    assert not keys.accepts("at start")
    path.write_text("\n")
    assert keys.accepts("first")
    path.write_bytes(b"\xff\xfe\n")
    assert keys.accepts("first")
    path.unlink()
    assert keys.accepts("first")
    # Kubernetes replaces a mounted secret by renaming a link.
    (tmp_path / "next").write_text("other\n")
    (tmp_path / "next").rename(path)
    assert keys.accepts("other")
    assert not keys.accepts("first")


async def control_status(http: aiohttp.ClientSession, url: str, key: str) -> int:
    async with http.get(url, headers={"Authorization": f"Bearer {key}"}) as response:
        return response.status


async def test_admin_key_is_rotated_while_the_proxy_runs(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    path = tmp_path / "admin-key"
    path.write_text(ADMIN_KEY)
    proxy = await start_proxy(admin_key_file=path)
    session = await proxy.session()

    async def statuses() -> list[int]:
        keys = (ADMIN_KEY, "the-next-key")
        return [await control_status(proxy.http, f"{proxy.url}/sessions", key) for key in keys]

    assert await statuses() == [200, 401]
    path.write_text(f"the-next-key\n{ADMIN_KEY}\n")
    assert await statuses() == [200, 200]
    path.write_text("the-next-key\n")
    assert await statuses() == [401, 200]
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    assert (await proxy.post(session, "chat/completions", body))[0] == 200


async def test_metrics_key_opens_metrics_and_nothing_else(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    path = tmp_path / "metrics-key"
    path.write_text("scrape\n")
    proxy = await start_proxy(metrics_key_file=path)
    for key, metrics, sessions in (("scrape", 200, 401), (ADMIN_KEY, 200, 200), ("x", 401, 401)):
        assert await control_status(proxy.http, f"{proxy.url}/metrics", key) == metrics
        assert await control_status(proxy.http, f"{proxy.url}/sessions", key) == sessions


async def test_without_a_metrics_key_only_the_admin_key_opens_metrics(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy()
    assert await control_status(proxy.http, f"{proxy.url}/metrics", "") == 401
    assert await control_status(proxy.http, f"{proxy.url}/metrics", ADMIN_KEY) == 200
