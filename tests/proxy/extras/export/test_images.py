"""Sessions with images in every format: with all of their images, or left out by name."""

from __future__ import annotations

import asyncio
import base64
import io
import warnings
from pathlib import Path
from typing import Any

import datasets
import msgspec
import orjson
import pyarrow.parquet as pq
import pytest
from PIL import Image

from proxy.cli import main
from proxy.config import RenderingConfig
from proxy.conversation.images import MARK
from proxy.extras.export.registry import FORMATS
from proxy.records import Reward, Turn
from proxy.records.binary import decode_record
from proxy.records.images import engine_ids
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.token_tree.sampled_paths import sampled_paths
from tests.proxy.conftest import ADMIN_KEY, RunningProxy
from tests.proxy.extras.view.pictures_of_agents import ICON, OTHER, SCREEN, record_pictures
from tests.proxy.serving.test_images import (  # noqa: F401
    asked,
    chat,
    proxy,
    said,
    seeing_checkpoint,
    start,
)

LEFT_OUT = {
    "sft": "TRL's SFTTrainer takes none beside ids",
    "trl": "TRL's rollout_func returns none",
    "skyrl": "SkyRL takes pixels",
}
GIF = b"GIF89a \0 \0\0\0\0,\0\0\0\0 \0 \0" + b"frames" * 4


@pytest.fixture(scope="session")
def seeing(seeing_checkpoint: Path) -> Rendering:  # noqa: F811
    return Rendering(load_tokenizer(seeing_checkpoint), RenderingConfig())


@pytest.fixture
async def pictures(proxy: RunningProxy) -> list[Turn]:  # noqa: F811
    """The turns of a session with images; another session of its task has none."""
    session = await record_pictures(proxy, "a-1")
    await proxy.control.add_reward("a-1", Reward("verifier", 1.0))
    text = await proxy.session(trial_id="a-0", metadata={"task_id": "look"})
    await chat(proxy, text, asked("No picture."))
    await proxy.control.add_reward("a-0", Reward("verifier", 0.0))
    return (await proxy.record(session))[1]


@pytest.fixture
def folder(tmp_path: Path, seeing_checkpoint: Path) -> Path:  # noqa: F811
    (tmp_path / "proxy.yaml").write_text(f"model: {seeing_checkpoint}\n")
    return tmp_path


async def run(folder: Path, name: str, out: str, *more: str) -> int:
    """Runs `export` in a thread, because the fixtures' servers run in this event loop."""
    arguments = ["export", "--format", name, "--out", str(folder / out), *more]
    arguments += ["--config", str(folder / "proxy.yaml"), "--store", f"sqlite:///{folder}/proxy.db"]
    return await asyncio.to_thread(main, arguments)


async def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    assert await run(folder, name, "out.jsonl") == 0
    return [orjson.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]


def data_of(url: str) -> bytes:
    head, _, text = url.partition(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(text)


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("name", FORMATS)
async def test_no_format_has_what_stands_for_an_image(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await rows(folder, name)
    written = orjson.dumps(found).decode()
    assert MARK not in written
    assert MARK.encode("unicode_escape").decode() not in written
    assert not [
        each
        for row in found
        for each in numbers(row)
        if each < 0 and each % 1 == 0 and each not in (-1, -100)
    ]
    told = capsys.readouterr().err
    if name in LEFT_OUT:
        assert f"sessions with images: {LEFT_OUT[name]}" in told
        assert "a-1" not in written
    else:
        assert "images" not in told or name == "dpo"


def numbers(value: Any) -> list[float]:
    """All integers of JSON."""
    if isinstance(value, dict):
        return [each for inner in value.values() for each in numbers(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in numbers(inner)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


@pytest.mark.parametrize("name", ["messages", "verl", "tokens", "prime-rl", "tinker", "atif"])
async def test_all_kinds_of_files_have_the_images(
    name: str, folder: Path, pictures: list[Turn]
) -> None:
    for out in ("out.jsonl", "out.parquet", "dataset"):
        assert await run(folder, name, out) == 0
    assert len(pictures) == 4
    table = pq.read_table(folder / "out.parquet").to_pylist()
    count = len((folder / "out.jsonl").read_bytes().splitlines())
    assert len(table) == count
    assert len(datasets.load_from_disk(str(folder / "dataset"))) == count


async def test_messages_have_parts_and_images_that_datasets_opens(
    folder: Path, pictures: list[Turn]
) -> None:
    assert len(pictures) == 4
    for out in ("out.parquet", "dataset"):
        assert await run(folder, "messages", out) == 0
    by_file = [
        datasets.Dataset.from_parquet(str(folder / "out.parquet"), cache_dir=str(folder / "c")),
        datasets.load_from_disk(str(folder / "dataset")),
    ]
    for found in by_file:
        row = next(each for each in found if len(each["messages"]) > 5)
        assert [image.size for image in row["images"]] == [(640, 400), (48, 48), (640, 400)]
        assert all(isinstance(image, Image.Image) for image in row["images"])
        kinds = [[part["type"] for part in each["content"]] for each in row["messages"]]
        assert kinds[0] == ["text", "image", "text", "image", "text"]
        assert kinds[2] == ["text", "image"]
    (row, *_) = [row for row in await rows(folder, "messages") if len(row["messages"]) > 5]
    assert [data_of(url) for url in row["images"]] == [SCREEN, ICON, OTHER]
    assert row["messages"][0]["content"][:2] == [
        {"type": "text", "text": "Compare"},
        {"type": "image"},
    ]


async def test_text_alone_keeps_its_form(folder: Path, pictures: list[Turn]) -> None:
    """Whatever else the store has."""
    assert len(pictures) == 4
    assert await run(folder, "messages", "out.jsonl", "a-0") == 0
    (row,) = [orjson.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    assert row["messages"][0]["content"] == "No picture."
    assert "images" not in row


async def test_tokens_have_spans_and_the_bytes(folder: Path, pictures: list[Turn]) -> None:
    found = [row for row in await rows(folder, "tokens") if row["images"]]
    paths = [path for path in sampled_paths(pictures) if path.images]
    for row, path in zip(found, paths, strict=True):
        assert row["ids"] == engine_ids(path.ids, path.images).tolist()
        for each, span in zip(row["images"], path.images, strict=True):
            assert (each["offset"], each["tokens"]) == (span.offset, span.tokens)
            assert each["digest"] == span.digest
    assert [data_of(each["image"]) for each in found[0]["images"]] == [SCREEN, ICON, OTHER]


async def test_records_have_the_images_beside_them(folder: Path, pictures: list[Turn]) -> None:
    assert await run(folder, "records", "records") == 0
    session, turns = decode_record((folder / "records/a-1.record").read_bytes())
    assert session.session_id == "a-1"
    assert [turn.images for turn in turns] == [turn.images for turn in pictures]
    for image in turns[0].images:
        data = (folder / f"records/{image.sha256}.image").read_bytes()
        assert data in (SCREEN, ICON)


async def test_verl_has_as_many_images_as_the_ids(folder: Path, pictures: list[Turn]) -> None:
    paths = [path.up_to_the_last_sampled() for path in sampled_paths(pictures)]
    found = [row for row in await rows(folder, "verl") if row["multi_modal_data"]]
    for row, path in zip(found, paths, strict=True):
        ids = row["prompt_ids"] + row["response_ids"]
        assert ids == engine_ids(path.ids, path.images).tolist()
        assert len(row["multi_modal_data"]["images"]) == len(path.images)


async def test_prime_rls_references_are_the_tokens_of_images(
    folder: Path, pictures: list[Turn]
) -> None:
    """The fields of `TrainingSample` at a608ad9."""
    place = msgspec.defstruct("MMImageRef", [("url", str), ("offset", int), ("length", int)])
    refs = msgspec.defstruct("MMRefs", [("images", list[place])])  # type: ignore[valid-type]
    pad = pictures[0].images[0].token
    found = [row for row in await rows(folder, "prime-rl") if row["mm_refs"]]
    assert len(found) == 2
    for row in found:
        assert len(row["mm_token_type_ids"]) == len(row["token_ids"])
        inside = [0] * len(row["token_ids"])
        for each in msgspec.convert(row["mm_refs"], refs).images:  # type: ignore[attr-defined]
            assert data_of(each.url) in (SCREEN, ICON, OTHER)
            inside[each.offset : each.offset + each.length] = [1] * each.length
        assert row["mm_token_type_ids"] == inside
        assert inside == [int(each == pad) for each in row["token_ids"]]


async def test_tinker_has_chunks_of_images(folder: Path, pictures: list[Turn]) -> None:
    pad, found = pictures[0].images[0].token, await rows(folder, "tinker")
    row = max(found, key=lambda each: len(each["model_input"]["chunks"]))
    chunks = row["model_input"]["chunks"]
    lengths = [each.get("expected_tokens") or len(each["tokens"]) for each in chunks]
    images = [base64.b64decode(each["data"]) for each in chunks if each["type"] == "image"]
    assert images == [SCREEN, ICON, OTHER]
    targets = row["loss_fn_inputs"]["target_tokens"]["data"]
    assert sum(lengths) == len(targets)
    assert not any(pad in each.get("tokens", ()) for each in chunks)
    assert pad in targets


async def test_atif_has_image_parts(folder: Path, pictures: list[Turn]) -> None:
    assert len(pictures) == 4
    found = [row for row in await rows(folder, "atif") if row["session_id"] == "a-1"]
    first = found[0]["steps"][0]["message"]
    assert [part["type"] for part in first] == ["text", "image", "text", "image", "text"]
    assert first[1]["source"]["media_type"] == "image/png"
    assert data_of(first[1]["source"]["path"]) == SCREEN
    (result,) = found[0]["steps"][1]["observation"]["results"]
    assert data_of(result["content"][1]["source"]["path"]) == OTHER


async def test_format_that_cannot_hold_a_kind_of_image_says_so(
    proxy: RunningProxy,  # noqa: F811
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = await proxy.session(trial_id="moving")
    await chat(proxy, session, asked(GIF, "What moves?"))
    await proxy.control.add_reward("moving", Reward("verifier", 1.0))
    assert await rows(folder, "tinker") == []
    assert "sessions with images that are neither PNG nor JPEG" in capsys.readouterr().err


async def test_preferences_have_the_images_of_their_prompt(
    proxy: RunningProxy,  # noqa: F811
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, reward in (("good", 1.0), ("bad", 0.0)):
        session = await proxy.session(trial_id=name, metadata={"task_id": "look"})
        proxy.answers(f"It is {name}.")
        answer = await chat(proxy, session, asked(SCREEN, "What?"))
        await proxy.control.add_reward(name, Reward("verifier", reward))
    (row,) = await rows(folder, "dpo")
    assert [data_of(url) for url in row["images"]] == [SCREEN]
    assert row["chosen"][0]["content"] == [{"type": "text", "text": "It is good."}]
    await chat(proxy, session, asked(SCREEN, "What?"), said(answer), asked(ICON, "And?"))
    assert await rows(folder, "dpo") == []
    assert "pairs with images after the prompt" in capsys.readouterr().err


async def test_page_downloads_a_session_with_its_images(
    proxy: RunningProxy,  # noqa: F811
    pictures: list[Turn],
) -> None:
    assert len(pictures) == 4
    headers, url = {"Authorization": f"Bearer {ADMIN_KEY}"}, f"{proxy.url}/view/session/export"
    for name, status in (("messages", 200), ("tokens", 200), ("skyrl", 409)):
        query = {"session": "a-1", "format": name}
        async with proxy.http.get(url, params=query, headers=headers) as response:
            body = await response.read()
            assert response.status == status, body
        assert MARK.encode() not in body
        if status == 200:
            assert base64.b64encode(SCREEN) in body
        else:
            assert b"sessions with images: SkyRL takes pixels" in body


def test_pictures_are_pictures() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Image.open(io.BytesIO(SCREEN)).size == (640, 400)
