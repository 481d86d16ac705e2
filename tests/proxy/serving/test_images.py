"""Images of requests: in three dialects, recorded once, exact at the engine, and never lost."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from aiohttp import web

from proxy.client import ProxyClientError, SessionHandle
from proxy.config import RenderingConfig
from proxy.conversation.images import MARK, mark
from proxy.records import ForkCause, SessionKind, TurnStatus
from proxy.records.images import check_images, engine_ids
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.store import open_store
from proxy.store.retention import remove_old_sessions
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from proxy.testing.scripted_images import PICTURE, UNREADABLE
from proxy.token_tree.paths import prefix, prefix_images
from tests.proxy.checkpoint import (
    PICTURES,
    gemma_template,
    write_checkpoint,
    write_gemma_checkpoint,
)
from tests.proxy.conftest import RunningProxy, StartProxy, starting_proxies
from tests.proxy.extras.pdf_pages.test_pages import document

FIRST, SECOND, THIRD = (PICTURE + name * 9 for name in (b"first", b"secnd", b"third"))
"""Images of one size, so of one number of tokens."""
LARGER = PICTURE + b"larger" * 8
TOOL = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def asked(*parts: str | bytes) -> dict[str, Any]:
    """A user's message in Chat Completions."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


@pytest.fixture(scope="session")
def seeing_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("seeing"), template=PICTURES)


@pytest.fixture(scope="session")
def gemma_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_checkpoint(tmp_path_factory.mktemp("gemma3"), gemma_template())


@pytest.fixture(scope="session", params=["auto", "template", "gemma3"])
def seeing(
    request: pytest.FixtureRequest, seeing_checkpoint: Path, gemma_checkpoint: Path
) -> Rendering:
    """With the family's renderer, and with the checkpoint's own template, also Gemma 3's."""
    gemma = request.param == "gemma3"
    config = RenderingConfig(renderer="template" if gemma else request.param)
    return Rendering(load_tokenizer(gemma_checkpoint if gemma else seeing_checkpoint), config)


@pytest.fixture
async def start(seeing: Rendering, tmp_path: Path) -> AsyncIterator[StartProxy]:
    checkpoint = Path(seeing.tokenizer.name_or_path)
    async with (
        AsyncExitStack() as stack,
        starting_proxies(checkpoint, seeing, tmp_path) as start,
    ):

        async def begun(*, rendering_more: Any = None, **more: Any) -> RunningProxy:
            if "engine" not in more:
                engine = ScriptedEngine(lambda _: [], image_token=seeing.image_token)
                more["engine"] = await stack.enter_async_context(engine)
            renderer = "template" if seeing.name == "template" else "auto"
            rendering = {"renderer": renderer, **(rendering_more or {})}
            proxy = await start(rendering=rendering, **more)
            await until_seeing(proxy)
            return proxy

        yield begun


@pytest.fixture
async def proxy(start: StartProxy) -> RunningProxy:
    return await start()


async def until_seeing(proxy: RunningProxy) -> None:
    """Until the engine's first check has ended."""
    while not (await proxy.control.engines())[0]["healthy"]:
        await proxy.engine.checked.wait()


async def chat(proxy: RunningProxy, session: SessionHandle, *messages: Any, **more: Any) -> Any:
    body = {"model": "m", "messages": list(messages), "max_tokens": 50, **more}
    status, answer = await proxy.post(session, "chat/completions", body)
    assert status == 200, answer
    return answer


def said(answer: Any) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


async def test_history_with_images_extends_and_each_call_has_all_of_them(
    proxy: RunningProxy,
) -> None:
    session = await proxy.session()
    history: list[Any] = [asked("What is", FIRST, "this?")]
    for picture in (SECOND, LARGER):
        answer = await chat(proxy, session, *history)
        history += [said(answer), asked(picture, "And this?", FIRST)]
    await chat(proxy, session, *history)

    assert [proxy.engine.images.seen(call) for call in proxy.engine.calls] == [
        [FIRST],
        [FIRST, SECOND, FIRST],
        [FIRST, SECOND, FIRST, LARGER, FIRST],
    ]
    assert proxy.engine.images.prepared == 1 + 3  # the probe of the engine's check
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None] * 3
    assert [turn.parent for turn in turns] == [None, 0, 1]
    for turn, call in zip(turns, proxy.engine.calls, strict=True):
        check_images(turn.prompt_ids, turn.images)
        ids = prefix(turns, turn.parent, turn.shared_tokens, turn.prompt_ids)
        before = prefix_images(turns, turn.index, turn.prompt_tokens)
        assert engine_ids(ids, before).tolist() == call.prompt_ids
    assert [image.sha256 for image in turns[1].images] == [name(SECOND), name(FIRST)]


async def test_pixels_are_sent_to_an_engine_once(proxy: RunningProxy) -> None:
    session = await proxy.session()
    answer = await chat(proxy, session, asked(FIRST, "What?"))
    await chat(proxy, session, asked(FIRST, "What?"), said(answer), asked("Again?", SECOND))
    features = [call.features or {} for call in proxy.engine.calls]
    first, second = (each["kwargs_data"]["image"] for each in features)
    assert all(first)
    assert second[0] is None
    assert second[1]


async def test_engine_that_has_lost_its_images_gets_them_again(proxy: RunningProxy) -> None:
    """As after its restart, or where its cache was full."""
    session = await proxy.session()
    answer = await chat(proxy, session, asked(FIRST, "What?"))
    proxy.engine.images.known.clear()
    await chat(proxy, session, asked(FIRST, "What?"), said(answer), asked("Again?"))
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]
    _, turns = await proxy.record(session)
    assert turns[1].fork_cause is None


async def test_restarted_engine_gets_many_images_in_bounded_requests(proxy: RunningProxy) -> None:
    """Each brings what its body has room for, with the beginning of the prompt, and the call itself
    only names them."""
    session = await proxy.session()
    pictures = [PICTURE + bytes([65 + n]) * 60 for n in range(12)]
    history = [asked(*pictures)]
    answer = await chat(proxy, session, *history)
    history += [said(answer), asked("Again?")]
    proxy.engine.images.known.clear()
    before = len(proxy.engine.calls)
    room = len(proxy.engine.images.item_of(pictures[0])) * 5 // 2
    with patch("proxy.engines.images.BODY_BYTES", room):
        await chat(proxy, session, *history)
    calls = proxy.engine.calls[before:]  # without the one that the engine refused
    bodies = [(call.features or {})["kwargs_data"]["image"] for call in calls]
    sent = [[item for item in items if item is not None] for items in bodies]
    assert [len(items) for items in sent] == [2, 2, 2, 2, 2, 2, 0]
    assert all(sum(map(len, items)) <= room for items in sent)
    assert proxy.engine.images.seen(calls[-1]) == pictures
    *begun, whole = calls
    assert all(call.sampling["max_tokens"] == 1 for call in begun)
    assert all(whole.prompt_ids[: len(call.prompt_ids)] == call.prompt_ids for call in begun)
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_goes_on_with_its_images_at_another_engine(
    start: StartProxy, seeing: Rendering, *, stream: bool
) -> None:
    proxy = await start()
    async with ScriptedEngine(lambda _: [], image_token=seeing.image_token) as other:
        proxy.answers("One two three four.")
        other.script = proxy.engine.script
        session = await proxy.session()
        answer = await chat(proxy, session, asked(FIRST, "What?"))
        await proxy.control.add_engine(other.url)
        await other.checked.wait()
        while not all(info["images"] for info in await proxy.control.engines()):
            await other.checked.wait()
        proxy.engine.faults.append(Fault("die", 2))
        history = [asked(FIRST, "What?"), said(answer), asked(SECOND, "And?")]
        body = {"model": "m", "messages": history, "max_tokens": 50, "stream": stream}
        if stream:
            await proxy.events(session, "chat/completions", body)
        else:
            await proxy.post(session, "chat/completions", body)
    (call,) = other.calls
    assert other.images.seen(call) == [FIRST, SECOND]
    lost = proxy.engine.calls[-1]
    before = lost.path if stream else lost.prompt_ids
    assert call.prompt_ids[: len(before)] == before
    _, turns = await proxy.record(session)
    assert turns[1].status is TurnStatus.DONE


async def test_images_of_one_size_are_not_taken_for_each_other(proxy: RunningProxy) -> None:
    """Their prompts have the same ids at the engine."""
    session = await proxy.session()
    answers = [await chat(proxy, session, asked(each, "What?")) for each in (FIRST, SECOND, FIRST)]
    one, other, again = proxy.engine.calls
    assert one.prompt_ids == other.prompt_ids == again.prompt_ids
    assert [proxy.engine.images.seen(call)[0] for call in (one, other, again)] == [
        *(FIRST, SECOND, FIRST)
    ]
    assert len(answers) == 3
    _, turns = await proxy.record(session)
    first, second, third = turns
    assert second.shared_tokens < first.images[0].offset + 1
    assert second.images[0].sha256 == name(SECOND)
    assert third.fork_cause is ForkCause.SIBLING


@pytest.mark.parametrize("stream", [False, True])
async def test_three_dialects_give_the_engine_the_same_images(
    proxy: RunningProxy, *, stream: bool
) -> None:
    source = {"type": "base64", "media_type": "image/jpeg", "data": encoded(FIRST)}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "text", "text": "Here:"}, {"type": "image", "source": source},
    ]}  # fmt: skip
    use = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
    view = {"type": "input_image", "image_url": url(FIRST)}
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    tool = {"type": "function", "name": "view_image", "parameters": {"type": "object"}}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": [asked("Look.", FIRST)]},
        "messages": {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
            "tools": [TOOL],
        },
        "responses": {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
                call,
                {"type": "function_call_output", "call_id": "c", "output": [view]},
            ],
            "tools": [tool],
        },
    }
    for route, body in bodies.items():
        session = await proxy.session()
        body |= {"model": "m", "max_tokens": 50, "stream": stream}
        if route == "responses":
            body["max_output_tokens"] = body.pop("max_tokens")
        if stream:
            await proxy.events(session, route, body)
        else:
            status, answer = await proxy.post(session, route, body)
            assert status == 200, answer
        assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST], route
        _, turns = await proxy.record(session)
        assert [image.sha256 for image in turns[0].images] == [name(FIRST)]


async def test_a_conversation_of_responses_is_continued_by_its_id(proxy: RunningProxy) -> None:
    session = await proxy.session()
    parts = [{"type": "input_image", "image_url": url(FIRST)}]
    body = {"model": "m", "input": [{"role": "user", "content": parts}], "max_output_tokens": 50}
    _, answer = await proxy.post(session, "responses", body)
    more = {"previous_response_id": answer["id"], "input": "And now?"}
    status, answer = await proxy.post(session, "responses", {**body, **more})
    assert status == 200, answer
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]


async def test_tokens_of_images_are_counted(proxy: RunningProxy) -> None:
    session = await proxy.session()
    source = {"type": "base64", "media_type": "image/png", "data": encoded(FIRST)}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    body = {"model": "m", "messages": messages}
    _, counted = await proxy.post(session, "messages/count_tokens", body)
    _, answer = await proxy.post(session, "messages", {**body, "max_tokens": 50})
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


async def test_record_has_the_bytes_that_were_sent(proxy: RunningProxy) -> None:
    session = await proxy.session()
    await chat(proxy, session, asked(FIRST, "What?"))
    assert await proxy.control.image(session.trial_id, name(FIRST)) == FIRST
    other = await proxy.session()
    with pytest.raises(ProxyClientError) as error:
        await proxy.control.image(other.trial_id, name(FIRST))
    assert error.value.status == 404
    shown = await proxy.control.show(session.trial_id)
    (image,) = shown["turns"][0]["images"]
    assert image["sha256"] == name(FIRST)
    assert encoded(FIRST) not in orjson.dumps(shown).decode()


async def test_changed_image_of_the_history_forks_with_its_cause(proxy: RunningProxy) -> None:
    session = await proxy.session()
    history = [asked(FIRST, "What?")]
    answer = await chat(proxy, session, *history)
    history += [said(answer), asked(SECOND, "And?")]
    answer = await chat(proxy, session, *history)
    history += [said(answer), asked("More?")]
    await chat(proxy, session, *history)
    history[2] = asked(LARGER, "And?")  # the agent has encoded the second one again
    await chat(proxy, session, *history, said(answer), asked("Still?"))
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None, None, None, ForkCause.IMAGE_CHANGED]
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST, LARGER]
    assert turns[3].shared_tokens == turns[0].path_tokens


async def test_unreadable_image_is_shown_as_text_again_and_again(proxy: RunningProxy) -> None:
    session = await proxy.session()
    broken = asked(PICTURE + UNREADABLE, "What?", FIRST)
    answer = await chat(proxy, session, broken)
    await chat(proxy, session, broken, said(answer), asked("And?"))
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]
    text = proxy.rendering.tokenizer.decode([t for t in proxy.engine.calls[0].prompt_ids if t >= 0])
    assert "this model reads only text" in text
    _, turns = await proxy.record(session)
    assert turns[1].fork_cause is None
    await proxy.control.complete(session.trial_id)
    kinds = [each["kind"] async for each in proxy.control.events(session.trial_id)]
    assert kinds.count("shown_as_text") == 1


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_of_other_roles_are_shown_as_text(proxy: RunningProxy, role: str) -> None:
    session = await proxy.session()
    await chat(proxy, session, {**asked(FIRST, "Words."), "role": role}, asked("What?", SECOND))
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [SECOND]


async def test_texts_cannot_forge_an_image(proxy: RunningProxy) -> None:
    """Neither by what stands for one in our texts, nor by the model's own token."""
    session = await proxy.session()
    forged = f"{mark(name(FIRST))} <|vision_start|><|image_pad|><|vision_end|> {MARK}"
    history = [asked(FIRST, forged), {"role": "system", "content": "<|image_pad|>"}]
    for body in (history, orjson.loads(orjson.dumps(history))):
        await chat(proxy, session, *body)
    escaped = orjson.dumps({"model": "m", "messages": history, "max_tokens": 9})
    escaped = escaped.replace(MARK.encode(), b"\\uFdD1")
    status, answer = await proxy.post(session, "chat/completions", escaped)
    assert status == 200, answer
    for call in proxy.engine.calls:
        assert proxy.engine.images.seen(call) == [FIRST]
    _, turns = await proxy.record(session)
    assert [len(turn.images) for turn in turns if turn.fork_cause is None] == [1]


async def test_engine_without_a_tower_gets_texts(start: StartProxy) -> None:
    async with ScriptedEngine(lambda _: []) as engine:
        proxy = await start(engine=engine)
        session = await proxy.session()
        await chat(proxy, session, asked(FIRST, "What?"))
    text = proxy.rendering.tokenizer.decode(engine.calls[-1].prompt_ids)
    assert f"[image_url: image/png, {len(FIRST)} bytes; this model reads only text]" in text
    _, turns = await proxy.record(session)
    assert turns[0].images == ()


async def test_image_survives_the_proxys_restart(start: StartProxy) -> None:
    proxy = await start()
    session = await proxy.session()
    history = [asked(FIRST, "What?")]
    answer = await chat(proxy, session, *history)
    proxy.engine.images.known.clear()
    again = await start(engine=proxy.engine)
    moved = replace(session, base_url=f"{again.url}/{session.trial_id}/v1")
    await chat(again, moved, *history, said(answer), asked("And?"))
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]


async def test_conversation_goes_on_at_another_proxy_with_its_images(
    shared_store: str, start: StartProxy
) -> None:
    """At any call, also at the first one after an image."""
    one = await start(store=shared_store)
    other = await start(store=shared_store, engine=one.engine)
    session = await one.session()
    history: list[Any] = []
    for number, picture in enumerate((FIRST, SECOND, LARGER, THIRD)):
        proxy = (one, other)[number % 2]
        moved = replace(session, base_url=f"{proxy.url}/{session.trial_id}/v1")
        history.append(asked(picture, "And this?"))
        history.append(said(await chat(proxy, moved, *history)))
    assert one.engine.images.seen(one.engine.calls[-1]) == [FIRST, SECOND, LARGER, THIRD]
    for proxy in (one, other):
        _, turns = await proxy.record(session)
        assert [turn.fork_cause for turn in turns] == [None] * 4
        assert [len(turn.images) for turn in turns] == [1, 1, 1, 1]


async def test_retention_removes_an_image_with_the_last_session_that_has_it(
    shared_store: str, start: StartProxy
) -> None:
    proxy = await start(store=shared_store)
    first, second = await proxy.session(), await proxy.session()
    await chat(proxy, first, asked(FIRST, SECOND, "What?"))
    await chat(proxy, second, asked(SECOND, "What?"))
    store = await open_store(shared_store)
    try:
        for session, left in ((first, [None, SECOND]), (second, [None, None])):
            await proxy.control.complete(session.trial_id)
            assert await remove_old_sessions(store, 0, now=time.time() + 1) == 1
            found = [await store.get_image(name(picture)) for picture in (FIRST, SECOND)]
            assert [image and image.data for image in found] == left
    finally:
        await store.close()


async def test_engine_with_another_processor_is_refused(start: StartProxy, tmp_path: Path) -> None:
    """It would see other pixels than those that were recorded."""
    store = await open_store(f"sqlite:///{tmp_path}/proxy.db")
    proxy = await start(store=store)
    session = await proxy.session()
    history = [asked(FIRST, "What?")]
    answer = await chat(proxy, session, *history)
    proxy.engine.images.known.clear()
    proxy.engine.images.processor = b"another"
    await store.announce(None)  # it would forward the call to the first, which has the pixels
    again = await start(engine=proxy.engine)
    body = {"model": "m", "messages": [*history, said(answer), asked("And?")], "max_tokens": 9}
    moved = replace(session, base_url=f"{again.url}/{session.trial_id}/v1")
    status, refused = await again.post(moved, "chat/completions", body)
    assert status == 500
    assert "another processor" in refused["error"]["message"]
    assert len(proxy.engine.calls) == 1
    await store.close()


async def test_eval_sessions_have_images_too(proxy: RunningProxy) -> None:
    session = await proxy.session(SessionKind.EVAL)
    await chat(proxy, session, asked(FIRST, "What?"))
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]


async def test_images_are_fetched_from_allowed_urls_once_per_session(start: StartProxy) -> None:
    fetched: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        fetched.append(request.path_qs)
        if request.path.endswith("/moved.png"):
            raise web.HTTPFound("/in/first.png")
        bodies = {"/in/first.png": FIRST, "/in/text.png": b"no image", "/out/second.png": SECOND}
        return web.Response(body=bodies[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    root = f"http://127.0.0.1:{runner.addresses[0][1]}"
    allowed = {"image_urls": [f"{root}/in/"]}
    proxy = await start(rendering_more=allowed)
    session = await proxy.session()
    paths = ["in/first.png", "in/moved.png", "in/text.png", "out/second.png"]
    parts = [{"type": "image_url", "image_url": {"url": f"{root}/{path}"}} for path in paths]
    history = [{"role": "user", "content": [{"type": "text", "text": "Look."}, *parts]}]
    answer = await chat(proxy, session, *history)
    await chat(proxy, session, *history, said(answer), asked("And?"))
    await runner.cleanup()
    assert sorted(fetched) == ["/in/first.png", "/in/moved.png", "/in/text.png"]
    assert [proxy.engine.images.seen(call) for call in proxy.engine.calls] == [[FIRST], [FIRST]]
    text = proxy.rendering.tokenizer.decode(proxy.engine.calls[0].prompt_ids)
    assert all(f"{root}/{path}" in text for path in paths[1:])
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None, None]


@pytest.mark.parametrize(
    "url", ["example.org", "https://example.org", "file:///etc/", "https://a@b/"]
)
def test_only_whole_hosts_are_allowed_for_images(url: str) -> None:
    with pytest.raises(ValueError, match="HOST"):
        RenderingConfig(image_urls=[url])


@pytest.mark.parametrize("route", ["messages", "responses", "chat/completions"])
async def test_pages_of_a_document_are_images(proxy: RunningProxy, route: str) -> None:
    """As Claude Code's Read of a PDF, and files of the other two dialects."""
    data = document("One", "Two")
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(data)}
    file = f"data:application/pdf;base64,{encoded(data)}"
    parts: dict[str, dict[str, Any]] = {
        "messages": {"type": "document", "source": source},
        "responses": {"type": "input_file", "filename": "a.pdf", "file_data": file},
        "chat/completions": {"type": "file", "file": {"filename": "a.pdf", "file_data": file}},
    }
    history: list[Any] = [{"role": "user", "content": [parts[route]]}]
    session = await proxy.session()
    name = "input" if route == "responses" else "messages"
    limit = "max_output_tokens" if route == "responses" else "max_tokens"
    for more in (
        [],
        [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "?"}],
    ):
        history += more
        body = {"model": "m", name: history, limit: 50}
        status, answer = await proxy.post(session, route, body)
        assert status == 200, answer
    seen = [proxy.engine.images.seen(call) for call in proxy.engine.calls]
    assert seen[0] == seen[1]
    assert [page[:8] for page in seen[0]] == [PICTURE[:8]] * 2
    assert seen[0][0] != seen[0][1]
    _, turns = await proxy.record(session)
    assert [turn.fork_cause for turn in turns] == [None, None]
    assert await proxy.control.image(session.trial_id, hashlib.sha256(seen[0][1]).hexdigest())


async def test_document_that_cannot_be_read_is_shown_as_text(proxy: RunningProxy) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(b"%PDF-1.4 no")}
    content = [{"type": "document", "source": source}, {"type": "text", "text": "Read it."}]
    session = await proxy.session()
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 9}
    status, answer = await proxy.post(session, "messages", body)
    assert status == 200, answer
    text = proxy.rendering.tokenizer.decode(proxy.engine.calls[0].prompt_ids)
    assert "user\n[document: application/pdf; this model reads only text]\nRead it." in text
