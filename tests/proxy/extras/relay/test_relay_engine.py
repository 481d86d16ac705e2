"""The proxy's side of a worker whose connections come and go, with raw messages."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from proxy.engines.protocol import Chunk, Sampling
from proxy.errors import EngineError, EngineRefusal
from proxy.extras.relay.engine import RelayEngine
from proxy.extras.relay.protocol import (
    FRAME_BYTES,
    PROTOCOL_VERSION,
    Check,
    Fingerprint,
    Frame,
    Generate,
    Health,
    Hello,
    ToWorker,
    encode,
    frame_of,
    pack_ids,
)
from proxy.records import ALTERNATIVE
from proxy.records.alternatives import MAX_ALTERNATIVES
from tests.proxy.extras.relay.conftest import PROMPT

GRACE_S = 3600.0


class Connection:
    """Keeps what is sent to the worker."""

    def __init__(self) -> None:
        self.sent: list[ToWorker] = []

    def post(self, message: ToWorker) -> None:
        self.sent.append(message)

    def drop(self, reason: str) -> None: ...


def hello(*calls: int) -> Hello:
    """What a worker says that still knows these calls."""
    return Hello(
        protocol=PROTOCOL_VERSION,
        name="gpu-0",
        incarnation="i-1",
        fingerprint=Fingerprint("t", "a"),
        model="m",
        version=0,
        max_context_tokens=100,
        max_calls=8,
        calls=calls,
    )


@pytest.fixture
def engine() -> RelayEngine:
    return RelayEngine(hello(), window=8, grace_s=GRACE_S, on_lost=lambda engine: None)


def frame(number: int, *ids: int) -> Frame:
    return Frame(0, number, ids=pack_ids(ids), logprobs=b"\0\0\0\0" * len(ids))


@pytest.mark.parametrize("received", [0, 1])
async def test_call_that_the_worker_has_abandoned_is_sent_again_only_if_nothing_came_of_it(
    engine: RelayEngine, received: int
) -> None:
    first, second = Connection(), Connection()
    engine.attach(first, hello())
    read: list[int] = []
    call = asyncio.create_task(
        engine.generate(
            PROMPT, Sampling(max_tokens=9), lambda chunk: read.extend(chunk.ids), request_id="r"
        )
    )
    await asyncio.sleep(0)
    for number in range(received):
        engine.receive(frame(number, 7))
    engine.detach(first, gone=False)
    engine.attach(second, hello())  # its grace time, which began earlier, has ended
    again = [message for message in second.sent if isinstance(message, Generate)]
    assert [message.prompt for message in again] == [pack_ids(PROMPT)] * (1 - received)
    if received:
        with pytest.raises(EngineError, match="'gpu-0' has abandoned the call"):
            async with asyncio.timeout(1):
                await call
    call.cancel()
    assert read == [7] * received


async def test_worker_that_answers_a_check_and_loses_its_connection_is_not_healthy(
    engine: RelayEngine,
) -> None:
    connection = Connection()
    engine.attach(connection, hello())
    check = asyncio.create_task(engine.check())
    await asyncio.sleep(0)
    (question,) = (message for message in connection.sent if isinstance(message, Check))
    engine.receive(Health(question.number, version=0))
    engine.detach(connection, gone=False)  # before the check's task runs
    with pytest.raises(EngineError, match="'gpu-0' lost its connection"):
        await check
    assert not engine.info.healthy
    await engine.close()


@pytest.mark.parametrize("tokens", [45_000, 120_000])
def test_answer_that_is_not_streamed_fits_into_a_message_or_is_refused(tokens: int) -> None:
    """A larger message would end the connection with all of its calls."""
    tops = [[(100_000 + i, -0.5) for i in range(MAX_ALTERNATIVES)]] * tokens
    chunk = Chunk([100_000] * tokens, [-0.5] * tokens, top_logprobs=tops)
    chunk.alternatives = np.zeros((tokens, MAX_ALTERNATIVES), ALTERNATIVE)
    chunk.routed_experts = np.zeros((tokens - 2000, 48, 8), np.uint8)
    try:
        sent = frame_of(0, 0, chunk)
    except EngineRefusal:
        assert tokens == 120_000
    else:
        assert len(encode(sent)) <= FRAME_BYTES
        assert (len(sent.top_logprobs or ()), len(sent.ids)) == (tokens, 4 * tokens)
