"""Branches and replays of sessions with images: the same images, found where they were recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.client import SessionHandle
from proxy.commands.replay import replay
from proxy.config import RenderingConfig
from proxy.conversation.images import MARK
from proxy.engines.vllm_scoring import VllmScorer
from proxy.errors import ImageError
from proxy.records import BranchMode, Origin, RecordedImage, TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.conftest import RunningProxy
from tests.proxy.serving.test_images import (  # noqa: F401
    FIRST,
    LARGER,
    SECOND,
    THIRD,
    asked,
    chat,
    encoded,
    name,
    proxy,
    said,
    seeing_checkpoint,
    start,
    url,
)


@pytest.fixture(scope="session")
def seeing(seeing_checkpoint: Path) -> Rendering:  # noqa: F811
    return Rendering(load_tokenizer(seeing_checkpoint), RenderingConfig())


class Images:
    """The images of a proxy's session."""

    def __init__(self, proxy: RunningProxy, session: SessionHandle) -> None:  # noqa: F811
        self._proxy = proxy
        self._session = session.trial_id

    async def get_image(self, sha256: str) -> RecordedImage:
        data = await self._proxy.control.image(self._session, sha256)
        return RecordedImage(sha256, "image/png", data)


async def record(proxy: RunningProxy) -> tuple[SessionHandle, list[Any]]:  # noqa: F811
    """A session of two turns with images; its conversation."""
    session = await proxy.session(trial_id="origin")
    history: list[Any] = [asked("What is", FIRST, "at 12:00:00?")]
    answer = await chat(proxy, session, *history)
    history += [said(answer), asked(SECOND, "And this?")]
    history.append(said(await chat(proxy, session, *history)))
    proxy.engine.calls.clear()
    return session, history


async def test_branch_is_answered_from_the_record_and_goes_on_with_all_images(
    proxy: RunningProxy,  # noqa: F811
) -> None:
    _, history = await record(proxy)
    branch = await proxy.control.branch(Origin("origin", 2), "branch")
    for size in (1, 3):
        answer = await chat(proxy, branch, *history[:size])
        assert said(answer)["content"] == history[size]["content"]
    assert proxy.engine.calls == []
    await chat(proxy, branch, *history, asked("And?", LARGER))
    assert [proxy.engine.images.seen(call) for call in proxy.engine.calls] == [
        [FIRST, SECOND, LARGER]
    ]
    _, turns = await proxy.record(branch)
    assert [turn.status for turn in turns] == [TurnStatus.CONTEXT] * 2 + [TurnStatus.DONE]
    assert turns[2].parent == 1
    assert turns[2].fork_cause is None
    for data in (FIRST, SECOND, LARGER):
        assert await proxy.control.image("branch", name(data)) == data


MESSAGES = "messages"
CHAT = "chat/completions"
RESPONSES = "responses"


def look(route: str, number: int, picture: bytes) -> list[Any]:
    """What an agent sends after an answer: a picture, as a tool's result in the dialects that have
    pictures there."""
    if route == CHAT:
        return [asked("And", picture)]
    if route == RESPONSES:
        named = {"name": "view_image", "arguments": f'{{"path": "{number}.png"}}'}
        view = {"type": "input_image", "image_url": url(picture)}
        return [
            {"type": "function_call", "call_id": f"c{number}", **named},
            {"type": "function_call_output", "call_id": f"c{number}", "output": [view]},
        ]
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture)}
    read = {"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {"n": number}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}"}
    block = {"type": "image", "source": source}
    return [
        {"role": "assistant", "content": [read]},
        {"role": "user", "content": [{**result, "content": [block]}]},
    ]


async def run(proxy: RunningProxy, session: SessionHandle, route: str) -> None:  # noqa: F811
    """An agent of four calls, which sees a new picture before each but the first."""
    history: list[Any] = [{"role": "user", "content": "Look at all."}]
    for number, picture in enumerate((b"", FIRST, SECOND, FIRST)):
        if picture:
            history += look(route, number, picture)
        body: dict[str, Any] = {"model": "m", "messages": history, "max_tokens": 50}
        if route == RESPONSES:
            body = {"model": "m", "input": history, "max_output_tokens": 50}
        status, answer = await proxy.post(session, route, body)
        assert status == 200, answer
        if route == CHAT:
            history.append(said(answer))
        elif route == RESPONSES:
            history += answer["output"]
        else:
            history.append({"role": "assistant", "content": answer["content"]})


@pytest.mark.parametrize("route", [CHAT, MESSAGES, RESPONSES])
async def test_agent_that_is_run_again_from_any_turn_leaves_the_same_record(
    proxy: RunningProxy,  # noqa: F811
    route: str,
) -> None:
    proxy.answers("I see.")
    origin = await proxy.session(trial_id="origin")
    await run(proxy, origin, route)
    _, recorded = await proxy.record(origin)
    assert sum(len(turn.images) for turn in recorded) == 3
    for k in range(1, len(recorded) + 1):
        proxy.engine.calls.clear()
        branch = await proxy.control.branch(Origin("origin", k), f"again-{k}")
        await run(proxy, branch, route)
        assert len(proxy.engine.calls) == len(recorded) - k
        _, turns = await proxy.record(branch)
        for turn, before in zip(turns, recorded, strict=True):
            assert turn.prompt_ids.tolist() == before.prompt_ids.tolist()
            assert turn.sampled_ids.tolist() == before.sampled_ids.tolist()
            assert (turn.parent, turn.images) == (before.parent, before.images)
            assert turn.fork_cause is before.fork_cause


@pytest.mark.parametrize("mode", BranchMode)
async def test_another_image_diverges_and_the_difference_names_both(
    proxy: RunningProxy,  # noqa: F811
    mode: BranchMode,
) -> None:
    _, history = await record(proxy)
    branch = await proxy.control.branch(Origin("origin", 2, mode), "branch")
    # The time is tolerated.
    await chat(proxy, branch, asked("What is", FIRST, "at 13:59:59?"))
    assert proxy.engine.calls == []
    body = {"messages": [*history[:2], asked(THIRD, "And this?")], "max_tokens": 9}
    status, refused = await proxy.post(branch, "chat/completions", {"model": "m", **body})
    shown = await proxy.control.show("branch")
    (told,) = shown["replay"]["diverged"]
    assert f"[image {name(SECOND)[:12]}]" in told
    assert f"[image {name(THIRD)[:12]}]" in told
    assert MARK not in told
    if mode is BranchMode.STRICT:
        assert status == 403
        assert MARK not in refused["error"]["message"]
    else:
        assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST, THIRD]


async def test_branch_after_a_restart_has_the_images_of_its_origin(
    proxy: RunningProxy,  # noqa: F811
    start: Any,  # noqa: F811
) -> None:
    _, history = await record(proxy)
    branch = await proxy.control.branch(Origin("origin", 1, BranchMode.LIVE), "branch")
    proxy.engine.images.known.clear()
    again = await start(engine=proxy.engine)
    moved = replace(branch, base_url=f"{again.url}/branch/v1")
    await chat(again, moved, *history[:2], asked("And now?"))
    assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]


async def test_response_is_continued_twice_after_a_restart(
    proxy: RunningProxy,  # noqa: F811
    start: Any,  # noqa: F811
) -> None:
    """Neither request brings the image again."""
    session = await proxy.session(trial_id="origin")
    parts = [{"type": "input_image", "image_url": url(FIRST)}]
    body = {"model": "m", "input": [{"role": "user", "content": parts}], "max_output_tokens": 50}
    _, first = await proxy.post(session, "responses", body)
    again = await start(engine=proxy.engine)
    moved = replace(session, base_url=f"{again.url}/origin/v1")
    for asked_next in ("And now?", "Or now?"):
        more = {"previous_response_id": first["id"], "input": asked_next}
        status, answer = await again.post(moved, "responses", {**body, **more})
        assert status == 200, answer
        assert proxy.engine.images.seen(proxy.engine.calls[-1]) == [FIRST]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}])
async def test_replay_gives_the_engine_the_recorded_images(
    proxy: RunningProxy,  # noqa: F811
    sampling: dict[str, float],
) -> None:
    session = await proxy.session(sampling=sampling)
    history: list[Any] = [asked("What is", FIRST, "this?")]
    answer = await chat(proxy, session, *history)
    await chat(proxy, session, *history, said(answer), asked(SECOND, "And?", FIRST))
    _, turns = await proxy.record(session)
    proxy.engine.images.known.clear()
    proxy.engine.calls.clear()
    scorer = VllmScorer(proxy.engine.url, source=Images(proxy, session))
    try:
        compared, skipped = await replay(turns, scorer)
        assert skipped == []
        assert [each.turn for each in compared] == [0, 1]
        seen = [proxy.engine.images.seen(call) for call in proxy.engine.calls]
        assert seen
        assert all(each in ([FIRST], [FIRST, SECOND, FIRST]) for each in seen)
        assert [FIRST, SECOND, FIRST] in seen
        proxy.engine.images.known.clear()  # as after its restart
        await replay(turns, scorer)
    finally:
        await scorer.close()
    proxy.engine.images.processor = b"another"
    other = VllmScorer(proxy.engine.url, source=Images(proxy, session))
    with pytest.raises(ImageError, match="its processor is another one"):
        await replay(turns, other)
    await other.close()
