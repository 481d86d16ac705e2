"""Images on the page: shown to those who may read their session, and never as what stands for
them in the record."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.cli import main
from proxy.config import RenderingConfig
from proxy.conversation.images import MARK, mark
from proxy.extras.view.bounded import SHOWN_CHARS, cut
from proxy.records import Origin
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_images import PICTURE
from tests.needs import needs
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.extras.view.chromium import MISSING, Tab
from tests.proxy.extras.view.conftest import enter, show
from tests.proxy.extras.view.pictures_of_agents import ICON, OTHER, SCREEN, record_pictures
from tests.proxy.extras.view.test_api import Reader
from tests.proxy.serving.test_images import (  # noqa: F401
    asked,
    chat,
    proxy,
    seeing_checkpoint,
    start,
)

SCREEN_NAME, ICON_NAME, OTHER_NAME = (
    hashlib.sha256(each).hexdigest() for each in (SCREEN, ICON, OTHER)
)


@pytest.fixture(scope="session")
def seeing(seeing_checkpoint: Path) -> Rendering:  # noqa: F811
    return Rendering(load_tokenizer(seeing_checkpoint), RenderingConfig())


@pytest.fixture
def reader(proxy: RunningProxy) -> Reader:  # noqa: F811
    return Reader(proxy.http, proxy.url)


async def test_image_is_sent_as_it_came_and_runs_nothing(proxy: RunningProxy) -> None:  # noqa: F811
    await record_pictures(proxy)
    key = {"Authorization": f"Bearer {ADMIN_KEY}"}
    query = {"session": "looks", "sha256": SCREEN_NAME}
    url = f"{proxy.url}/view/image"
    async with proxy.http.get(url, params=query, headers=key) as response:
        assert response.status == 200
        assert await response.read() == SCREEN
        assert response.headers["Content-Type"] == "image/png"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert response.headers["Cache-Control"] == "no-store"
    async with proxy.http.get(url, params=query) as response:
        assert response.status == 401
    async with proxy.http.get(
        url, params=query, headers={**key, "Origin": "https://evil.test"}
    ) as response:
        assert response.status == 403


async def test_image_is_sent_only_with_a_session_that_has_it(
    proxy: RunningProxy,  # noqa: F811
    reader: Reader,
) -> None:
    await record_pictures(proxy)
    other = await proxy.session(trial_id="other")
    await chat(proxy, other, asked(ICON, "What?"))
    for session, sha256, status in (
        ("other", SCREEN_NAME, 404),
        ("nobody", SCREEN_NAME, 404),
        ("looks", "0" * 64, 404),
        ("looks", f"' OR 1=1 --{SCREEN_NAME}", 404),
        ("looks", "", 404),
    ):
        found, refused = await reader.ask("image", session=session, sha256=sha256)
        assert found == status, refused
    await proxy.control.branch(Origin("looks", 1), "branch")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    for sha256, status in ((SCREEN_NAME, 200), (OTHER_NAME, 404)):
        query = {"session": "branch", "sha256": sha256}
        url = f"{proxy.url}/view/image"
        async with proxy.http.get(url, params=query, headers=headers) as response:
            assert response.status == status, "a branch has the images of its recorded turns"


async def test_tokens_of_an_image_are_a_span_without_text(
    proxy: RunningProxy,  # noqa: F811
    reader: Reader,
) -> None:
    await record_pictures(proxy)
    pad = proxy.rendering.image_token
    page = await reader.get("tokens", session="looks", turn=1)
    assert [name for _, _, name in page["images"]] == [SCREEN_NAME, ICON_NAME, OTHER_NAME]
    for begin, end, _ in page["images"]:
        assert page["ids"][begin:end] == [pad] * (end - begin)
        assert page["texts"][begin:end] == [""] * (end - begin)
    assert min(page["ids"]) >= 0
    assert page["ids"].count(pad) == sum(end - begin for begin, end, _ in page["images"])
    # A page that begins and ends within images.
    first, last = page["images"][0], page["images"][2]
    part = await reader.get(
        "tokens", session="looks", turn=1, start=first[0] + 1, count=last[0] - first[0]
    )
    assert part["images"] == page["images"]
    assert part["ids"] == page["ids"][first[0] + 1 : last[0] + 1]
    assert part["texts"] == page["texts"][first[0] + 1 : last[0] + 1]


async def test_fork_at_an_image_names_both_images(proxy: RunningProxy, reader: Reader) -> None:  # noqa: F811
    await record_pictures(proxy)
    fork = await reader.get("fork", session="looks", turn=3)
    (change,) = fork["changes"]
    assert SCREEN_NAME[:12] in "".join(text for kind, text in change["parts"] if kind == "-")
    assert OTHER_NAME[:12] in "".join(text for kind, text in change["parts"] if kind == "+")
    tokens = fork["tokens"]
    assert tokens["recorded"]["images"][0][2] == SCREEN_NAME
    assert tokens["sent"]["images"][0][2] == OTHER_NAME
    for side in ("before", "recorded", "sent"):
        shown = tokens[side]
        assert len(shown["ids"]) == len(shown["texts"])
        assert min(shown["ids"], default=0) >= 0
    assert MARK not in orjson.dumps(fork["changes"]).decode()


async def test_titles_and_searches_say_image(proxy: RunningProxy, reader: Reader) -> None:  # noqa: F811
    await record_pictures(proxy)
    listed = await reader.get("sessions")
    assert listed["sessions"][0]["asked"] == "Compare [image] with this icon: [image] What differs?"
    for text, hits in (("with this icon: [image]", 2), (SCREEN_NAME[:16], 0), (MARK, 0)):
        found = await reader.get("search", text=text)
        assert len(found["hits"]) == hits
        assert MARK not in json.dumps(found, ensure_ascii=False)


def test_texts_are_not_cut_within_an_image() -> None:
    text = "x" * (SHOWN_CHARS - 10) + mark("a" * 64) + "y" * 10
    found: Any = cut(text)
    assert found == {"text": "x" * (SHOWN_CHARS - 10), "chars": len(text)}


async def test_long_text_is_read_in_pieces_that_cut_no_image(
    proxy: RunningProxy,  # noqa: F811
    reader: Reader,
) -> None:
    session = await proxy.session(trial_id="long")
    parts = [part for _ in range(40) for part in ("x" * 307, ICON)]
    await chat(proxy, session, asked(*parts))
    (turn,) = (await reader.get("turns", session="long", turns="0"))["turns"]
    text, whole = turn["messages"][0]["text"]["text"], turn["messages"][0]["text"]["chars"]
    while len(text) < whole:
        assert text.count(MARK) % 2 == 0
        place = {"session": "long", "turn": 0, "place": "0.text", "from": len(text)}
        text += (await reader.get("text", **place))["text"]
    assert text.count(mark(ICON_NAME)) == 40


async def test_command_line_says_image(
    proxy: RunningProxy,  # noqa: F811
    seeing_checkpoint: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, turns = await proxy.record(await record_pictures(proxy))
    store = ["--store", f"sqlite:///{tmp_path}/proxy.db"]
    model = ["--model", str(seeing_checkpoint)]
    for command in (["list"], ["show", "looks"], ["show", "looks", "--tokens", *model]):
        assert await asyncio.to_thread(main, ["sessions", *command, *store]) == 0
    printed = capsys.readouterr().out
    assert "Compare [image] with this icon: [image] What differs?" in printed
    for image in turns[0].images:
        first = int(turns[0].prompt_ids[image.offset])
        assert f"[image {-1 - first:08x}, {image.tokens} tokens]" in printed
    assert MARK not in printed
    assert SCREEN_NAME[:16] not in printed


@needs(MISSING)
@pytest.mark.programs
async def test_pictures_are_seen_and_enlarged(proxy: RunningProxy, tab: Tab) -> None:  # noqa: F811
    await record_pictures(proxy)
    await enter(tab, proxy)
    loaded = (
        "[...document.querySelectorAll('.message .picture img')]"
        ".filter(each => each.complete && each.naturalWidth > 0)"
    )
    await show(tab, "/trial/looks?turn=1", f"{loaded}.length === 3")
    assert await tab.evaluate(f"{loaded}.map(each => each.naturalWidth)") == [640, 48, 640]
    assert await tab.evaluate(f"{loaded}[0].getBoundingClientRect().width") <= 240
    assert SCREEN_NAME[:8] not in await tab.text(".conversation")
    await tab.click(".picture")
    assert await tab.evaluate(f"{loaded}[0].getBoundingClientRect().width") == 640
    assert await tab.evaluate("document.querySelector('.picture').ariaExpanded") == "true"
    await tab.size(390, 844, phone=True)
    assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    await tab.size(1280, 860)
    await show(tab, "/trial/looks?turn=3", "document.querySelector('.why figure')")
    assert OTHER_NAME[:12] in await tab.text(".diff .text ins")
    await show(tab, "/tokens/looks?turn=1&at=0", "document.querySelector('.flow .image')")
    chips = "[...document.querySelectorAll('.flow .image')].map(each => each.innerText)"
    turns = (await proxy.control.get_turns("looks"))[1]
    counts = [image.tokens for turn in turns[:2] for image in turn.images]
    assert await tab.evaluate(chips) == [f"image, {count} tokens" for count in counts]
    first = turns[0].images[0].offset
    await show(
        tab, f"/tokens/looks?turn=1&at={first}", "document.querySelector('.flow .image.chosen')"
    )
    await tab.evaluate("document.querySelector('.flow').focus()")
    await tab.press("ArrowRight", 39)
    await tab.until(f"document.querySelector('.details dd').innerText === '{first + counts[0]}'")
    await show(
        tab, f"/tokens/looks?turn=1&as=table&at={first}", "document.querySelector('td .image')"
    )
    assert f"image, {counts[0]} tokens" in await tab.text(".token-table")
    assert tab.complaints == []


@needs(MISSING)
@pytest.mark.programs
async def test_broken_image_says_so(start: StartProxy, tab: Tab) -> None:  # noqa: F811
    """Bytes that only look like a PNG."""
    proxy = await start()  # noqa: F811
    session = await proxy.session(trial_id="broken")
    await chat(proxy, session, asked(PICTURE + b"<script>", "What?"))
    await enter(tab, proxy)
    await show(tab, "/trial/broken", "document.querySelector('.message .tag.image')")
    assert "cannot be shown" in await tab.text(".message")
    assert tab.complaints == []
