"""Routed experts: from an engine's answer through failures and restarts into the record."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from proxy.client import SessionHandle
from proxy.engines.answer_check import AnswerCheck
from proxy.engines.protocol import Chunk, Engine, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError
from proxy.extras.engines.completions import CompletionsEngine
from proxy.extras.relay.protocol import EXPERTS_BYTES, chunk_of, frame_of
from proxy.records import FinishReason, Turn, routed_experts
from proxy.routing.generation import Generation
from proxy.routing.router import Router
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from proxy.testing.scripted_wires import scripted_experts
from proxy.token_tree.tree import TokenTree
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.pushed import pieces_of

PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [5, 6, 7, 2]
PATH = [*PROMPT.tolist(), *ANSWER]
RECORDED = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzog"
    "KDQsIDIsIDIpLCB9ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg"
    "ICAgICAgIAoDBwIFBAECBQYDAAEHAgYD"
)
"""What vLLM 0.32 sends: `numpy2base64` of `[4, 2, 2]` uint8."""


def test_recorded_answer_of_vllm_is_decoded() -> None:
    rows = routed_experts.load_text(RECORDED)
    assert rows.dtype == np.uint8
    expected = [[[3, 7], [2, 5]], [[4, 1], [2, 5]], [[6, 3], [0, 1]], [[7, 2], [6, 3]]]
    assert rows.tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "highest", "stored"),
    [("u1", 255, "u1"), ("<u2", 255, "<u2"), ("<i4", 255, "u1"), ("<i8", 300, "<u2")],
)
def test_rows_have_the_narrowest_type(dtype: str, highest: int, stored: str) -> None:
    rows = np.array([[[0, highest]]], dtype)
    loaded = routed_experts.load(routed_experts.dump(rows))
    assert loaded is not None
    assert loaded.dtype == np.dtype(stored)
    assert loaded.tolist() == rows.tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not npy",
        routed_experts.dump(np.zeros((2, 2), np.uint8)),
        routed_experts.dump(np.full((1, 1, 1), -1)),
        routed_experts.dump(np.full((1, 1, 1), 2**16)),
        routed_experts.dump(np.zeros((1, 1, 1), np.float32)),  # type: ignore[arg-type]
        (routed_experts.dump(np.zeros((3, 2, 2), np.uint8)) or b"")[:-1],
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        routed_experts.load(data)
    with pytest.raises(ValueError, match=r"."):
        routed_experts.load_text(b64encode(data).decode() + "!")


@pytest.fixture
async def servers() -> AsyncIterator[list[ScriptedEngine]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                ScriptedEngine(lambda prompt: ANSWER[len(prompt) - len(PROMPT) :])
            )
            for _ in range(2)
        ]


async def generated(engines: list[Engine], **sampling: Any) -> Generation:
    wanted = {"max_tokens": 50, "experts_from": 1, **sampling}
    router = Router(engines, vocab_size=100)
    await router.start()
    try:
        call = Generation(
            router, PROMPT, Sampling(**wanted), request_id="s#0", session_id="s", stream=True
        )
        async for _ in pieces_of(call):
            pass
        return call
    finally:
        await router.close()


async def test_rows_are_those_of_the_requested_tokens(servers: list[ScriptedEngine]) -> None:
    call = await generated([VllmEngine(servers[0].url)])
    assert call.routed_experts is not None
    assert call.routed_experts.tolist() == scripted_experts(PATH)[1:-1].tolist()


async def test_nothing_is_requested_or_kept_unless_wanted(servers: list[ScriptedEngine]) -> None:
    call = await generated([VllmEngine(servers[0].url)], experts_from=None)
    assert call.routed_experts is None
    assert "routed_experts_prompt_start" not in servers[0].calls[0].sampling


async def test_another_wire_reports_none(servers: list[ScriptedEngine]) -> None:
    call = await generated([CompletionsEngine(servers[0].url)])
    assert call.routed_experts is None


async def test_answer_that_another_engine_ends_has_the_rows_of_all_its_tokens(
    servers: list[ScriptedEngine],
) -> None:
    for server in servers:
        server.faults = [Fault("die", after_tokens=2)]
    call = await generated([VllmEngine(server.url) for server in servers])
    assert sum(len(server.calls) for server in servers) > 1
    assert call.routed_experts is not None
    assert call.routed_experts.tolist() == scripted_experts(PATH)[1:-1].tolist()


def test_rows_of_another_number_of_tokens_are_refused() -> None:
    sampling = Sampling(max_tokens=4, experts_from=1)
    chunk = Chunk([5, 2], [-1.0, -1.0], finish_reason=FinishReason.STOP)
    for count, good in ((2, False), (3, True), (4, False)):
        check = AnswerCheck(sampling, vocab_size=100, prompt_tokens=3)
        chunk.routed_experts = np.zeros((count, 2, 2), np.uint8)
        if good:
            check.take(chunk)
        else:
            with pytest.raises(EngineError, match=f"of {count} tokens, expected 3"):
                check.take(chunk)


def test_rows_travel_through_the_relay_unless_they_are_too_large() -> None:
    rows = scripted_experts(PATH)
    chunk = Chunk([], [], finish_reason=FinishReason.STOP, routed_experts=rows)
    received = chunk_of(frame_of(1, 0, chunk)).routed_experts
    assert received is not None
    assert received.tolist() == rows.tolist()
    chunk.routed_experts = np.zeros((EXPERTS_BYTES, 1, 1), np.uint8)
    assert chunk_of(frame_of(1, 0, chunk)).routed_experts is None


def a_turn(index: int, parent: int | None, shared: int, rows: int | None) -> Turn:
    return Turn(
        session_id="s",
        index=index,
        parent=parent,
        shared_tokens=shared,
        fork_cause=None,
        prompt_ids=PROMPT,
        request_key=bytes([index]) * 48,
        sampling={},
        sampled_ids=np.array(ANSWER, np.int32),
        routed_experts=None if rows is None else np.zeros((rows, 1, 1), np.uint8),
    )


def test_tree_knows_how_many_leading_tokens_have_rows() -> None:
    tree = TokenTree()
    for turn in (
        a_turn(0, None, 0, 6),
        a_turn(1, 0, 7, None),
        a_turn(2, 1, 14, 14),
        a_turn(3, 1, 12, None),
    ):
        tree.begin(turn)
        tree.commit(turn)
    assert [tree.routed(index, 100) for index in range(4)] == [6, 6, 20, 6]
    assert tree.routed(0, 2) == 2
    assert tree.routed(None, 0) == 0


async def ask(proxy: RunningProxy, session: SessionHandle, *texts: str) -> None:
    """`texts`: the user's and the assistant's messages, in turn."""
    roles = [("user", "assistant")[index % 2] for index in range(len(texts))]
    messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
    status, answer = await proxy.post(session, "chat/completions", {"messages": messages})
    assert status == 200, answer


def assert_rows_follow_each_other(turns: list[Turn], *, first: list[int]) -> None:
    """Each turn's rows are those of its path from the token in `first` on."""
    tree = TokenTree(turns)
    for turn, start in zip(turns, first, strict=True):
        assert turn.routed_experts is not None
        whole = scripted_experts(tree.path(turn.index).tolist())
        assert turn.routed_experts.tolist() == whole[start:-1].tolist()


async def test_each_turn_records_the_rows_that_its_path_lacks(start_proxy: StartProxy) -> None:
    """Also after a restart, and in a fork."""
    proxy = await start_proxy()
    session = await proxy.session(sampling={"routed_experts": 1})
    await ask(proxy, session, "One?")
    again = await start_proxy(engine=proxy.engine)
    for asked in (("One?", "Hello.", "Two?"), ("One?", "Hello.", "Three?")):
        await ask(again, session, *asked)
    _, turns = await again.record(session)
    lengths = [turn.path_tokens for turn in turns]
    assert [turn.parent for turn in turns] == [None, 0, 0]
    assert_rows_follow_each_other(turns, first=[0, lengths[0] - 1, lengths[0] - 1])


async def test_sessions_record_routed_experts_by_default_if_the_proxy_does(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(sessions={"routed_experts": True})
    recorded, off = await proxy.session(), await proxy.session(sampling={"routed_experts": 0})
    for session in (recorded, off):
        await ask(proxy, session, "One?")
    assert_rows_follow_each_other((await proxy.record(recorded))[1], first=[0])
    (turn,) = (await proxy.record(off))[1]
    assert turn.routed_experts is None
