"""A server gets the prompt that its client had, whatever either of them has forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engines.last_prompts import MIN_TOKENS
from proxy.engines.protocol import Sampling
from proxy.engines.vllm import VllmEngine
from proxy.extras.binary_route.prompt_parts import ReceivedPrompts, SentPrompts, UnknownPrefixError
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.engines.test_frames import ANSWER
from tests.proxy.pushed import chunks_of

steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(-40, 40), st.booleans(), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(steps, st.sampled_from([0, 5_000, 10**9]))
def test_received_prompt_is_the_sent_one(
    steps: list[tuple[str, int, bool, bool]], limit_bytes: int
) -> None:
    sent, received = SentPrompts(), ReceivedPrompts(limit_bytes)
    last = {name: np.arange(MIN_TOKENS, dtype=np.int32) for name in "ab"}
    for name, change, edit, lost in steps:
        ids = last[name][: max(1, len(last[name]) + change)].copy()
        ids = np.append(ids, np.arange(max(0, change), dtype=np.int32))
        if edit:
            ids[len(ids) // 2] += 1
        if lost:  # a part that never arrives
            sent.part(ids, name)
        try:
            got = received.whole(*sent.part(ids, name))
        except UnknownPrefixError:
            sent.forget(name)
            got = received.whole(*sent.part(ids, name))
        assert got.tolist() == ids.tolist()
        assert received._bytes == sum(each.nbytes for each in received._kept.values())
        assert received._bytes <= limit_bytes
        last[name] = ids


def test_part_of_a_prompt_that_extends_the_last_one_is_what_is_new() -> None:
    sent, received = SentPrompts(), ReceivedPrompts()
    ids = np.arange(MIN_TOKENS + 9, dtype=np.int32)
    prefix, new = sent.part(ids[:MIN_TOKENS], "s")
    assert (prefix, len(new)) == (b"", MIN_TOKENS * 4)
    received.whole(prefix, new)
    prefix, new = sent.part(ids, "s")
    assert np.frombuffer(new, np.int32).tolist() == ids[MIN_TOKENS:].tolist()
    with pytest.raises(UnknownPrefixError):
        ReceivedPrompts().whole(prefix, new)
    assert received.whole(prefix, new).tolist() == ids.tolist()
    sent.forget("s")
    assert len(sent) == 0


async def test_engine_gets_each_prompt_of_a_conversation_whole() -> None:
    async with ScriptedEngine(lambda _: ANSWER, frames=True) as server:
        engine = VllmEngine(server.url)
        await engine.check()
        connection = engine._frames._connection
        assert connection is not None
        ids = np.arange(3 * MIN_TOKENS, dtype=np.int32) % 250
        for turn, tokens in enumerate(range(MIN_TOKENS, 3 * MIN_TOKENS, 100)):
            if turn == 7:  # as if the server had no room for it
                for socket in server._sockets:
                    socket._connection._prompts._kept.clear()
            call = chunks_of(engine, ids[:tokens], Sampling(max_tokens=9), request_id=f"s#{turn}")
            assert [token async for chunk in call for token in chunk.ids] == ANSWER
            assert server.calls[turn].prompt_ids == ids[:tokens].tolist()
        assert len(connection.sent) > 0
        engine.forget("s")
        assert len(connection.sent) == 0
        await engine.close()
