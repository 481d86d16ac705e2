"""Alternatives: from an engine's answer through failures and restarts into the record, while the
agent gets what it requested."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.client import ProxyClientError, SessionHandle
from proxy.engines.answer_check import AnswerCheck
from proxy.engines.protocol import Chunk, Sampling
from proxy.engines.vllm import VllmEngine
from proxy.errors import EngineError
from proxy.extras.engines.completions import CompletionsEngine
from proxy.extras.engines.sglang import SglangEngine
from proxy.extras.relay.protocol import ALTERNATIVES_BYTES, Frame, ProtocolError, chunk_of, frame_of
from proxy.records import ALTERNATIVE, Alternatives, SessionKind, Turn, TurnStatus
from proxy.records.alternatives import CollectedAlternatives, dump, load, table
from proxy.testing.scripted_engine import Fault, ScriptedEngine
from proxy.testing.scripted_wires import scripted_alternatives, scripted_logprob
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.pushed import chunks_of

PROMPT = np.array([11, 12, 13], np.int32)
ANSWER = [5, 6, 7, 80, 99, 2]
ENGINES: dict[str, type[VllmEngine | CompletionsEngine | SglangEngine]] = {
    "vllm": VllmEngine,
    "completions": CompletionsEngine,
    "sglang": SglangEngine,
}
TOPS = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-700, 0, width=32)), max_size=5),
    max_size=4,
)


def scripted_rows(path: list[int], sampled: int, columns: int) -> list[list[tuple[int, float]]]:
    """What the scripted engine reports for the last `sampled` tokens of a path."""
    rows = []
    for at in range(len(path) - sampled, len(path)):
        own = scripted_logprob(path[at - 1], path[at])
        rows.append(scripted_alternatives(path[at], own, columns))
    return rows


def assert_rows(found: Alternatives | None, expected: list[list[tuple[int, float]]]) -> None:
    assert found is not None
    assert found["id"].tolist() == [[token for token, _ in row] for row in expected]
    logprobs = np.array([[value for _, value in row] for row in expected], np.float32)
    np.testing.assert_array_equal(found["logprob"], logprobs)


@given(TOPS, st.integers(1, 4))
def test_rows_have_the_most_probable_tokens_and_survive_their_encoding(
    tops: list[list[tuple[int, float]]], columns: int
) -> None:
    rows = table(tops, columns)
    assert rows.shape == (len(tops), columns)
    for row, top in zip(rows, tops, strict=True):
        best = sorted((value for _, value in top), reverse=True)[:columns]
        assert row["logprob"].tolist() == best + [-np.inf] * (columns - len(best))
        known = [(each["id"].item(), each["logprob"].item()) for each in row[: len(best)]]
        assert set(known) <= set(top)
        assert (row["id"][len(best) :] == -1).all()
    loaded = load(dump(rows))
    assert loaded is not None
    assert (loaded.dtype, loaded.shape) == (rows.dtype, rows.shape)
    assert loaded.tobytes() == rows.tobytes()


def test_tokens_of_probability_0_are_left_out() -> None:
    assert table([[(4, -9999.0), (3, -0.5)]], 2).tolist() == [[(3, -0.5), (-1, -np.inf)]]


@pytest.mark.parametrize("top", [(2**31, -1.0), (2**63, -1.0), (1, 1e300)])
def test_numbers_that_are_too_large_are_refused(top: tuple[int, float]) -> None:
    with pytest.raises(ValueError, match="too large"):
        table([[top]], 1)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\0\0\0\0", b"\2\0\0\0" + b"\0" * 8])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="bytes are not rows of"):
        load(data)
    with pytest.raises(ProtocolError, match="unreadable alternatives"):
        chunk_of(Frame(1, 0, alternatives=data))


def test_tokens_of_an_engine_that_reports_none_have_empty_rows() -> None:
    collected = CollectedAlternatives(2)
    collected.add(1, None)
    assert collected.rows() is None
    collected.add(1, table([[(3, -0.5), (4, -1.0)]], 2))
    collected.add(0, None)
    rows = collected.rows()
    assert rows is not None
    assert rows["id"].tolist() == [[-1, -1], [3, 4]]


@pytest.mark.parametrize(
    ("top", "rows", "words"),
    [
        ((5, -1.0), 2, "of the shape"),
        ((-7, -1.0), 1, "the token id -7"),
        ((100, -1.0), 1, "the token id 100"),
        ((5, 0.5), 1, "not a number"),
        ((5, float("nan")), 1, "not a number"),
    ],
)
def test_invalid_alternatives_are_an_engine_error(
    top: tuple[int, float], rows: int, words: str
) -> None:
    check = AnswerCheck(Sampling(max_tokens=4, alternatives=1), vocab_size=100)
    chunk = Chunk([5], [-1.0], alternatives=np.array([[top]] * rows, ALTERNATIVE))
    with pytest.raises(EngineError, match=words):
        check.take(chunk)


def test_rows_travel_through_the_relay_unless_they_are_too_large() -> None:
    rows = table([[(3, -0.5), (4, -1.0)]], 3)
    received = chunk_of(frame_of(1, 0, Chunk([3], [-0.5], alternatives=rows))).alternatives
    assert received is not None
    assert received.tobytes() == rows.tobytes()
    many = np.zeros((ALTERNATIVES_BYTES // 8, 1), ALTERNATIVE)
    assert chunk_of(frame_of(1, 0, Chunk([], [], alternatives=many))).alternatives is None


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(lambda prompt: ANSWER) as running:
        yield running


async def sampled(server: ScriptedEngine, kind: str, **sampling: int) -> list[Chunk]:
    engine = ENGINES[kind](server.url)
    wanted = Sampling(max_tokens=50, **sampling)  # type: ignore[arg-type]
    chunks = [chunk async for chunk in chunks_of(engine, PROMPT, wanted, request_id="s#0")]
    await engine.close()
    return chunks


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("requested", [0, 1, 2, 4])
async def test_agent_gets_what_it_requests_however_many_are_recorded(
    kind: str, requested: int, server: ScriptedEngine
) -> None:
    alone = [
        top
        for c in await sampled(server, kind, top_logprobs=requested)
        for top in c.top_logprobs or ()
    ]
    for recorded in (5, 20):
        chunks = await sampled(server, kind, top_logprobs=requested, alternatives=recorded)
        tops = [top for chunk in chunks for top in chunk.top_logprobs or ()]
        assert [dict(top) for top in tops] == [dict(top) for top in alone]
        assert [top[:1] for top in tops] == [top[:1] for top in alone]
        rows = np.concatenate([c.alternatives for c in chunks if c.alternatives is not None])
        # With 20, vLLM reports the sampled token and 19 others.
        size = 19 if recorded == 20 else recorded
        assert_rows(rows[:, :size], scripted_rows([*PROMPT, *ANSWER], len(ANSWER), size))


@pytest.mark.parametrize("kind", ENGINES)
async def test_nothing_is_requested_by_default(kind: str, server: ScriptedEngine) -> None:
    assert {chunk.alternatives for chunk in await sampled(server, kind)} == {None}
    assert server.calls[0].sampling["logprobs"] == 0


async def ask(proxy: RunningProxy, session: SessionHandle, text: str = "One?", **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **more}
    status, answer = await proxy.post(session, "chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["logprobs"]


def assert_recorded(turn: Turn, path: list[int], columns: int) -> None:
    assert_rows(turn.alternatives, scripted_rows(path, len(turn.sampled_ids), columns))


def path_of(turn: Turn) -> list[int]:
    """The path of a root."""
    return [*turn.prompt_ids.tolist(), *turn.sampled_ids.tolist()]


async def test_session_records_alternatives_that_its_agent_does_not_get(
    start_proxy: StartProxy,
) -> None:
    """Also in the record of a proxy that starts later on the same store."""
    proxy = await start_proxy()
    session = await proxy.session(sampling={"alternatives": 5})
    assert await ask(proxy, session, "One?") is None
    answer = await ask(proxy, session, "Two?", logprobs=True)
    assert {len(token["top_logprobs"]) for token in answer["content"]} == {0}
    answer = await ask(proxy, session, "Three?", logprobs=True, top_logprobs=2)
    assert {len(token["top_logprobs"]) for token in answer["content"]} == {2}
    again = await start_proxy(engine=proxy.engine)
    for turn in (await again.record(session))[1]:
        assert_recorded(turn, path_of(turn), 5)


async def test_streamed_answer_records_the_same_rows(proxy: RunningProxy) -> None:
    session = await proxy.session(sampling={"alternatives": 3})
    body = {"messages": [{"role": "user", "content": "One?"}], "stream": True}
    events = await proxy.events(session, "chat/completions", body)
    assert events[-1] == b"data: [DONE]"
    (turn,) = (await proxy.record(session))[1]
    assert_recorded(turn, path_of(turn), 3)


async def test_alternatives_that_the_agent_requests_are_recorded(proxy: RunningProxy) -> None:
    session = await proxy.session()
    answer = await ask(proxy, session, logprobs=True, top_logprobs=4)
    assert {len(token["top_logprobs"]) for token in answer["content"]} == {4}
    (turn,) = (await proxy.record(session))[1]
    assert turn.alternatives is not None
    assert len(turn.alternatives) == len(turn.sampled_ids)
    # The agent gets the tokens of the text, which the end-of-turn token is not a part of.
    assert len(answer["content"]) == len(turn.sampled_ids) - 1
    for row, token in zip(turn.alternatives[:-1], answer["content"], strict=True):
        values = sorted((top["logprob"] for top in token["top_logprobs"]), reverse=True)
        np.testing.assert_array_equal(row["logprob"], np.array(values, np.float32))
    assert proxy.engine.calls[0].sampling["logprobs"] == 4


async def test_proxy_records_for_all_sessions_that_do_not_say_otherwise(
    start_proxy: StartProxy,
) -> None:
    proxy = await start_proxy(sessions={"alternatives": 2})
    on, off = await proxy.session(), await proxy.session(sampling={"alternatives": 0})
    for session in (on, off):
        await ask(proxy, session)
    (turn,) = (await proxy.record(on))[1]
    assert_recorded(turn, path_of(turn), 2)
    (turn,) = (await proxy.record(off))[1]
    assert turn.alternatives is None


async def test_cut_turn_keeps_the_rows_of_its_tokens(proxy: RunningProxy) -> None:
    proxy.answers("one two three four five")
    proxy.engine.faults = [Fault("stall", after_tokens=3)]
    session = await proxy.session(kind=SessionKind.EVAL, sampling={"alternatives": 4})
    body = orjson.dumps({"messages": [{"role": "user", "content": "Say"}], "stream": True})
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.base_url}/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as said:
        async for line in said.content:
            if b'"content":"o' in line:
                break
    await proxy.control.complete(session.trial_id)
    (turn,) = (await proxy.record(session))[1]
    assert turn.status is TurnStatus.CUT
    assert len(turn.sampled_ids) > 0
    assert_recorded(turn, path_of(turn), 4)


async def test_answer_that_goes_on_after_a_failure_has_the_rows_of_all_its_tokens(
    proxy: RunningProxy,
) -> None:
    proxy.answers("one two three four five")
    session = await proxy.session(sampling={"alternatives": 4})
    await ask(proxy, session)
    (undisturbed,) = (await proxy.record(session))[1]
    answer = undisturbed.sampled_ids.tolist()
    prompt = len(undisturbed.prompt_ids)
    proxy.engine.script = lambda path: answer[len(path) - prompt :]
    other = await proxy.session(sampling={"alternatives": 4})
    proxy.engine.faults = [Fault("die", after_tokens=2)]
    body = {"messages": [{"role": "user", "content": "One?"}], "stream": True}
    await proxy.events(other, "chat/completions", body)
    (turn,) = (await proxy.record(other))[1]
    assert len(proxy.engine.calls) == 3
    assert turn.sampled_ids.tolist() == undisturbed.sampled_ids.tolist()
    assert_recorded(turn, path_of(turn), 4)


@pytest.mark.parametrize("count", [21, -1, 1.5])
async def test_other_numbers_of_alternatives_are_refused(proxy: RunningProxy, count: float) -> None:
    with pytest.raises(ProxyClientError, match="expected an integer from 0 to 20"):
        await proxy.session(sampling={"alternatives": count})


async def test_refusal_by_the_engine_says_what_to_do(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.engine.max_logprobs = 5
    session = await proxy.session(sampling={"alternatives": 8})
    body = {"messages": [{"role": "user", "content": "One?"}]}
    with caplog.at_level(logging.WARNING):
        status, answer = await proxy.post(session, "chat/completions", body)
    assert status == 400
    assert "the proxy's log has the reason" in answer["error"]["message"]
    assert "sample logprobs of 9" in caplog.text
    assert "start the engine with a higher --max-logprobs, or lower" in caplog.text
