"""A call that has ended is freed at once, without the garbage collector, which runs rarely. What
the engines keep of a session is freed when the session ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.engines.last_prompts import MIN_TOKENS
from proxy.engines.prompt_json import PromptJson
from proxy.serving.call import LiveCall
from proxy.wire.dialect import Call
from tests.proxy.conftest import StartProxy

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
TOO_LONG = {"model": "m", "messages": [{"role": "user", "content": "Hello."}] * 200}


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def in_memory(*kinds: type) -> list[Any]:
    """The instances of these classes. `isinstance` would run code of other objects, whose
    `__class__` may be a property that warns."""
    return [each for each in gc.get_objects() if type(each) in kinds]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (ASKED, 200),
        ({**ASKED, "stream": True}, 200),
        (TOO_LONG, 400),
        ({**TOO_LONG, "stream": True}, 400),
        ({**ASKED, "tool_choice": "required"}, 400),
        ({**ASKED, "messages": []}, 400),
    ],
    ids=["answered", "streamed", "overlong", "overlong stream", "no tools", "malformed"],
)
async def test_ended_call_is_freed_without_the_garbage_collector(
    start_proxy: StartProxy, without_collections: None, body: Any, status: int
) -> None:
    earlier = in_memory(LiveCall, Call)  # a state machine of another test keeps its last calls
    known = {id(each) for each in earlier}
    proxy = await start_proxy(max_context_tokens=1000)
    session = await proxy.session()
    for _ in range(2):  # aiohttp keeps a connection's last request until the next one
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with proxy.http.post(url, json=body, headers=headers) as response:
            assert response.status == status, await response.text()
            await response.read()
    await proxy.control.get_turns(session.trial_id)
    assert [each for each in in_memory(LiveCall, Call) if id(each) not in known] == []


@pytest.mark.parametrize("end", ["complete", "delete"])
async def test_prompt_that_an_engine_keeps_is_freed_when_its_session_ends(
    start_proxy: StartProxy, end: str
) -> None:
    known = {id(each) for each in in_memory(PromptJson)}
    proxy = await start_proxy()
    (prompts,) = [each for each in in_memory(PromptJson) if id(each) not in known]
    ended, open_ = await proxy.session(), await proxy.session()
    long = {"model": "m", "messages": [{"role": "user", "content": "Go on. " * MIN_TOKENS}]}
    sizes = []
    for session in (open_, ended):
        assert (await proxy.post(session, "chat/completions", long))[0] == 200
        sizes.append(len(prompts))
    assert 0 < sizes[0] < sizes[1]
    await getattr(proxy.control, end)(ended.trial_id)
    assert len(prompts) == sizes[0]
