"""A rollout has the images of its segments, as its agent sent them, for as long as it is kept."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_loop.producers.buffer import Drawn, ReplayBuffer
from agent_loop.records import AgentEnd, AgentResult, Group, Rollout, RolloutStatus, Task, Trial
from agent_loop.remote_agent_loop import RemoteAgentLoop
from agent_loop.rewards.reported import LauncherReward
from agent_loop.trial.config import TrialConfig
from proxy.client import ProxyClient
from proxy.config import RenderingConfig
from proxy.records import SessionKind
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine
from tests.proxy.checkpoint import PICTURES, write_checkpoint
from tests.proxy.conftest import RunningProxy, starting_proxies
from tests.proxy.serving.test_images import FIRST, SECOND, asked, name, until_seeing

TASK = Task("look", {})


class LookingAgent:
    """Shows one image in each of two calls; the first is repeated in the second."""

    overhead_s = 0.0

    async def run(self, trial: Trial) -> AgentResult:
        headers = {"Authorization": f"Bearer {trial.api_key}"}
        messages = [asked(FIRST, "What is this?")]
        async with aiohttp.ClientSession(headers=headers) as http:
            for picture in (SECOND, None):
                body = {"model": trial.model, "messages": messages, "max_tokens": 20}
                async with http.post(trial.base_url + "/chat/completions", json=body) as response:
                    answer = await response.json()
                if picture is not None:
                    messages += [answer["choices"][0]["message"], asked("And", picture)]
        return AgentResult(AgentEnd.EXITED, reward=1.0)

    async def close(self) -> None: ...


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[RunningProxy]:
    checkpoint = write_checkpoint(tmp_path / "model", template=PICTURES)
    seeing = Rendering(load_tokenizer(checkpoint), RenderingConfig())
    async with (
        starting_proxies(checkpoint, seeing, tmp_path) as start,
        ScriptedEngine(lambda _: [], image_token=seeing.image_token) as engine,
    ):
        proxy = await start(engine=engine)
        await until_seeing(proxy)
        yield proxy


@pytest.fixture
async def loop(proxy: RunningProxy, tmp_path: Path) -> AsyncIterator[RemoteAgentLoop]:
    loop = RemoteAgentLoop(
        ProxyClient(proxy.url, proxy.control.admin_key),
        LookingAgent(),
        LauncherReward(),
        tmp_path / "trials",
        trial=TrialConfig(sandbox="off", max_retries=0),
    )
    yield loop
    await loop.close()


async def test_rollout_has_each_image_once(loop: RemoteAgentLoop) -> None:
    rollout = await loop.run(TASK, kind=SessionKind.TRAIN)
    assert rollout.pictures == {name(FIRST): FIRST, name(SECOND): SECOND}
    found = [image.sha256 for segment in rollout.segments for image in segment.images]
    assert found == [name(FIRST), name(SECOND)]


async def test_evaluation_fetches_none(loop: RemoteAgentLoop) -> None:
    assert not (await loop.run(TASK, kind=SessionKind.EVAL)).pictures


async def test_trial_whose_image_is_lost_or_another_fails(
    loop: RemoteAgentLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def others(self: ProxyClient, *args: Any, **more: Any) -> tuple[bytes, str]:
        data, media_type = await sent(self, *args, **more)
        return (SECOND if "/images/" in str(args) else data), media_type

    sent = ProxyClient._answer
    monkeypatch.setattr(ProxyClient, "_answer", others)
    rollout = await loop.run(TASK, kind=SessionKind.TRAIN)
    assert rollout.status is RolloutStatus.FAILED
    assert f"other bytes than the image {name(FIRST)}" in (rollout.error or "")


async def test_images_are_as_durable_as_the_tokens_that_name_them(
    loop: RemoteAgentLoop, tmp_path: Path
) -> None:
    """And are in a group once, however many of its rollouts have them."""
    rollout = await loop.run(TASK, kind=SessionKind.TRAIN)
    other = dataclasses.replace(rollout, trial_id="other")
    plain = dataclasses.replace(rollout, segments=(), pictures={})
    buffer = ReplayBuffer(tmp_path / "buffer.sqlite")
    await buffer.draw(Drawn(0, TASK), {})
    await buffer.put(0, Group("g", TASK, [rollout, other, plain]))
    buffer.close()
    file = ReplayBuffer(tmp_path / "buffer.sqlite")
    (group,) = (await asyncio.to_thread(file.restore, 0, 9)).ready.values()
    file.close()
    pictures = [each.pictures for each in group.rollouts]
    assert pictures == [rollout.pictures, rollout.pictures, {}]
    assert pictures[0][name(FIRST)] is pictures[1][name(FIRST)]
    assert _stored(tmp_path).count(FIRST) == 1


def _stored(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.glob("buffer.sqlite*"))


def test_rollout_without_images_has_none() -> None:
    assert not Rollout("r", TASK, RolloutStatus.DONE, 1.0).pictures
