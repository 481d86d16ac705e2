"""An agent calls a proxy whose engines are all behind the relay."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.records import TurnStatus
from tests.proxy.conftest import RunningProxy, StartProxy
from tests.proxy.continued import Continued
from tests.proxy.extras.relay.conftest import TOKEN, StartWorker, Worker

CHAT = "chat/completions"


@pytest.fixture
async def proxy(start_proxy: StartProxy) -> RunningProxy:
    """A proxy without an engine of its own."""
    proxy = await start_proxy(relay={"token": SecretStr(TOKEN), "grace_s": 0.2})
    (engine,) = await proxy.control.engines()
    await proxy.control.remove_engine(engine["name"])
    return proxy


async def connect(
    proxy: RunningProxy, start_worker: StartWorker, checkpoint: Path, name: str
) -> Worker:
    worker = await start_worker(
        None,
        url=proxy.url.replace("http", "ws"),
        engine=proxy.engine.url,
        model=checkpoint,
        name=name,
    )
    async with asyncio.timeout(20):
        await worker.says("connected to")
    return worker


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


async def test_a_call_waits_for_a_worker_is_answered_by_it_and_recorded(
    proxy: RunningProxy, start_worker: StartWorker, checkpoint: Path
) -> None:
    session = await proxy.session()
    proxy.engine.version = 4
    call = asyncio.create_task(proxy.post(session, CHAT, chat("Hi.")))
    await connect(proxy, start_worker, checkpoint, "gpu-0")
    status, answer = await call
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello.")
    _, turns = await proxy.record(session)
    done = [turn for turn in turns if turn.status is TurnStatus.DONE]
    assert [turn.sampled_ids.tolist() for turn in done] == [proxy.engine.calls[0].answer_ids]
    assert [span.version for span in done[0].versions] == [4]


async def test_call_whose_worker_is_killed_is_trained_once(
    proxy: RunningProxy, start_worker: StartWorker, checkpoint: Path
) -> None:
    workers = {
        name: await connect(proxy, start_worker, checkpoint, name) for name in ("gpu-0", "gpu-1")
    }
    session = await proxy.session()
    proxy.engine.token_delay_s = 0.1
    first = asyncio.create_task(proxy.post(session, CHAT, chat("Hi.")))
    await proxy.engine.called.wait()
    await proxy.engine.calls[0].began.wait()
    (serving,) = [e["name"] for e in await proxy.control.engines() if e["in_flight"]]
    workers[serving].signal(signal.SIGKILL)
    status, _ = await first
    if status != 200:
        assert status == 503
        status, _ = await proxy.post(session, CHAT, chat("Hi."))
    assert status == 200
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns if turn.sampled] == [TurnStatus.DONE]
    assert len(await proxy.control.engines()) == 1


async def test_worker_cannot_take_the_name_of_an_engine(
    proxy: RunningProxy, start_worker: StartWorker, checkpoint: Path
) -> None:
    await proxy.control.add_engine(proxy.engine.url, name="gpu-0")
    worker = await start_worker(
        None, url=proxy.url.replace("http", "ws"), engine=proxy.engine.url, model=checkpoint
    )
    assert "gpu-0" in await worker.ended()


async def test_answer_goes_on_at_another_worker_from_the_tokens_so_far(
    proxy: RunningProxy, start_worker: StartWorker, checkpoint: Path
) -> None:
    workers = {
        name: await connect(proxy, start_worker, checkpoint, name) for name in ("gpu-0", "gpu-1")
    }
    engine = proxy.engine
    text = "One two three four five six seven eight nine ten."
    tokenizer = proxy.rendering.tokenizer
    whole = [*tokenizer.encode(text), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    continued = Continued(lambda _: whole)
    engine.script, engine.token_delay_s = continued, 0.02
    session = await proxy.session()
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body, url = chat("Count.") | {"stream": True}, f"{session.base_url}/{CHAT}"
    async with proxy.http.post(url, json=body, headers=headers) as response:
        data = b""
        while b'" two"' not in data:
            data += await response.content.readany()
        (serving,) = [e["name"] for e in await proxy.control.engines() if e["in_flight"]]
        workers[serving].signal(signal.SIGKILL)
        data += await response.read()
    assert data.rstrip().endswith(b"data: [DONE]")
    first, second = engine.calls
    seam = len(second.prompt_ids) - len(first.prompt_ids)
    assert 0 < seam < len(whole)
    assert second.prompt_ids == [*first.prompt_ids, *whole[:seam]]
    _, turns = await proxy.record(session)
    assert [turn.status for turn in turns] == [TurnStatus.DONE]
    assert turns[0].sampled_ids.tolist() == whole
