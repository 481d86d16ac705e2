"""Recorded sessions with images, from each place in which they can be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest

from proxy.cli import main
from proxy.config import RenderingConfig
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.conftest import ADMIN_KEY, RunningProxy, StartProxy
from tests.proxy.serving.test_images import (
    FIRST,
    SECOND,
    asked,
    chat,
    name,
    said,
    seeing_checkpoint,
    start,
)
from trainer.errors import ConfigError
from trainer.extras.sft.config import SftConfig
from trainer.extras.sft.demonstrations import Demonstrations, read_demonstrations

__all__ = ["seeing_checkpoint", "start"]


@pytest.fixture(scope="session")
def seeing(seeing_checkpoint: Path) -> Rendering:
    return Rendering(load_tokenizer(seeing_checkpoint), RenderingConfig())


@pytest.fixture
async def recorded(start: StartProxy) -> RunningProxy:
    proxy = await start()
    session = await proxy.session()
    history = [asked(FIRST, "What?")]
    history.append(said(await chat(proxy, session, *history)))
    await chat(proxy, session, *history, asked(SECOND, "And this?"))
    await proxy.control.complete(session.trial_id)
    return proxy


async def read(
    place: str, model: Path, *, ids: Literal["auto", "rendered"] = "auto", **more: bool
) -> Demonstrations:
    config = SftConfig(sessions=(place,), ids=ids)
    return await read_demonstrations(config, model, RenderingConfig(), 4096, **more)


def check(found: Demonstrations) -> None:
    (each,) = found.found
    assert each.source == "recorded"
    assert each.rollout.pictures == {name(FIRST): FIRST, name(SECOND): SECOND}
    spans = [image.sha256 for part in each.rollout.segments for image in part.images]
    assert spans == [name(FIRST), name(SECOND)]
    assert each.trained > 0


async def test_every_place_gives_the_images(
    recorded: RunningProxy,
    seeing_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGENTIC_PROXY_ADMIN_KEY", ADMIN_KEY)
    store, folder = f"sqlite:///{tmp_path}/proxy.db", tmp_path / "records"
    check(await read(store, seeing_checkpoint, reads_images=True))
    check(await read(recorded.url, seeing_checkpoint, reads_images=True))
    words = ["export", "--format", "records", "--store", store, "--out", str(folder)]
    assert await asyncio.to_thread(main, words) == 0
    check(await read(str(folder), seeing_checkpoint, reads_images=True))

    (folder / f"{name(FIRST)}.image").write_bytes(SECOND)
    with pytest.raises(ConfigError, match="has other bytes than were recorded"):
        await read(str(folder), seeing_checkpoint, reads_images=True)
    (folder / f"{name(FIRST)}.image").unlink()
    with pytest.raises(ConfigError, match=f"its image {name(FIRST)} is not in the store"):
        await read(str(folder), seeing_checkpoint, reads_images=True)


async def test_model_that_reads_only_text_leaves_the_session_out(
    recorded: RunningProxy,
    seeing_checkpoint: Path,
    tmp_path: Path,
) -> None:
    store = f"sqlite:///{tmp_path}/proxy.db"
    with pytest.raises(ConfigError, match=r"images, which model\.vision=text"):
        await read(store, seeing_checkpoint)


async def test_session_that_would_have_to_be_rendered_is_left_out(
    recorded: RunningProxy,
    seeing_checkpoint: Path,
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="images, which are trained with recorded ids"):
        await read(
            f"sqlite:///{tmp_path}/proxy.db", seeing_checkpoint, ids="rendered", reads_images=True
        )
