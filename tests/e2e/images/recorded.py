"""Calls with images through a proxy to a real vLLM, and what the record says of them. Prints JSON.

PYTHONPATH=.cache/torchvision:. python -m tests.e2e.images.recorded qwen3_vl
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from aiohttp import web
from PIL import Image

from proxy.app import build_app
from proxy.client import ProxyClient, ProxyClientError, SessionHandle
from proxy.commands.replay import replay
from proxy.config import load_config
from proxy.engines.images import GRID, digest_of
from proxy.engines.vllm_scoring import VllmScorer
from proxy.engines.vllm_server import VllmConfig, VllmServer
from proxy.http.server import app_runner
from proxy.records import Origin, RecordedImage, Turn
from proxy.records.images import engine_ids
from proxy.token_tree.paths import path, prefix_images
from tests.e2e.images.checkpoints import CONTEXT_TOKENS, MODELS
from tests.e2e.images.compare import Own
from tests.e2e.images.engine import MODEL, encoded, noise
from tests.proxy.checkpoint import gemma_template

KEY = "admin-key-of-the-test"
PICTURES = {name: noise(seed, *size) for name, seed, size in (
    ("small", 1, (96, 64)), ("wide", 2, (300, 40)), ("tall", 3, (64, 128)), ("twin", 4, (96, 64)),
)}  # fmt: skip
BYTES = {hashlib.sha256(encoded(p)).hexdigest(): p for p in PICTURES.values()}
READ = {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object"}}


def picture(name: str) -> str:
    return base64.b64encode(encoded(PICTURES[name])).decode()


def chat_picture(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(name)}"}}


class Calls:
    """Calls of agents in three dialects."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def post(self, session: SessionHandle, route: str, **body: Any) -> dict[str, Any]:
        key = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/{route}"
        async with self._http.post(url, json={"model": "m", **body}, headers=key) as response:
            text = await response.text()
            assert response.status == 200, text
            return dict(json.loads(text))

    async def chat(self, session: SessionHandle, history: list[Any], *names: str) -> None:
        content = [*map(chat_picture, names), {"type": "text", "text": "what is this"}]
        history.append({"role": "user", "content": content})
        answer = await self.post(session, "chat/completions", messages=history, max_tokens=12)
        history.append(answer["choices"][0]["message"])

    async def messages(self, session: SessionHandle) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": picture("tall")}
        image = {"type": "image", "source": source}
        use = {"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "x.png"}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
        ]
        await self.post(session, "messages", messages=messages, tools=[READ], max_tokens=12)

    async def responses(self, session: SessionHandle) -> None:
        view = {"type": "input_image", "image_url": f"data:image/png;base64,{picture('small')}"}
        first = await self.post(
            session, "responses", input=[{"role": "user", "content": [view]}], max_output_tokens=12
        )
        before = first["id"]
        await self.post(
            session, "responses", input="And now?", previous_response_id=before, max_output_tokens=9
        )


async def found(kind: str, folder: Path) -> dict[str, Any]:
    dtype = "bfloat16" if kind == "qwen3_5" else "float32"
    own = Own(kind, folder, torch.bfloat16 if kind == "qwen3_5" else torch.float32)
    config = VllmConfig(
        max_context_tokens=CONTEXT_TOKENS,
        max_sequences=4,
        nice=1,
        env={"PYTHONPATH": os.environ["PYTHONPATH"]},
    )

    def server() -> VllmServer:
        log = folder.parent / "vllm.log"
        return VllmServer(config, folder, log=log, dtype=dtype, served_model_name=MODEL)

    store = f"sqlite:///{folder.parent}/record.db"
    settings = load_config(None, model=folder, store=store, admin_key=KEY, engines=[])
    runner = app_runner(build_app(settings), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with ProxyClient(url, KEY) as control, aiohttp.ClientSession() as http:
        calls, history = Calls(http), list[Any]()
        session = await control.create_session("chat")
        async with server() as first:
            await control.add_engine(first.url, name="first")
            await calls.chat(session, history, "small")
            await calls.chat(session, history, "wide", "twin")
            for name in ("messages", "responses"):
                other = await control.create_session(name)
                await getattr(calls, name)(other)
        await control.remove_engine("first")
        async with server() as second:  # has had none of the images
            await control.add_engine(second.url, name="second")
            await calls.chat(session, history, "small")
            branch, again = await control.branch(Origin("chat", 2), "branch"), list[Any]()
            for shown in (("small",), ("wide", "twin"), ("tall",)):
                await calls.chat(branch, again, *shown)
            replayed = await replays(control, second.url)
        records = {
            name: await control.get_turns(name)
            for name in ("chat", "messages", "responses", "branch")
        }
    await runner.cleanup()
    turns = {name: turns for name, (_, turns) in records.items()}
    branched = turns.pop("branch")
    return {
        "branch": [str(turn.status) for turn in branched],
        "branch_answers": again[:4] == history[:4],
        "branch_differences": differences(own, branched),
        "replayed": replayed,
        "forks": [str(t.fork_cause) for each in turns.values() for t in each if t.fork_cause],
        "images": {name: [names(t) for t in each] for name, each in turns.items()},
        "digests": digests(own, turns),
        "differences": {name: differences(own, each) for name, each in turns.items()},
        "swapped": differences(own, turns["chat"], swap=True),
    }


async def replays(control: ProxyClient, url: str) -> dict[str, list[float]]:
    """Of each turn the largest difference between recorded and replayed log-probabilities."""

    class Source:
        async def get_image(self, sha256: str) -> RecordedImage:
            found = [await image(each, sha256) for each in ("chat", "messages", "branch")]
            return RecordedImage(sha256, "image/png", next(data for data in found if data))

    async def image(session: str, sha256: str) -> bytes | None:
        with suppress(ProxyClientError):
            return await control.image(session, sha256)
        return None

    scorer, out = VllmScorer(url, source=Source()), {}
    for name in ("chat", "messages", "responses", "branch"):
        _, turns = await control.get_turns(name)
        compared, _ = await replay(turns, scorer)
        out[name] = [each.largest for each in compared]
    await scorer.close()
    return out


def names(turn: Turn) -> list[str]:
    by_bytes = {hashlib.sha256(encoded(p)).hexdigest(): name for name, p in PICTURES.items()}
    return [by_bytes[image.sha256] for image in turn.images]


def digests(own: Own, turns: dict[str, list[Turn]]) -> bool:
    """Whether the recorded digests are those of the tensors that the checkpoint's own processor
    makes of the recorded bytes."""
    recorded = {i.sha256: i.digest for each in turns.values() for t in each for i in t.images}
    return all(digest == own_digest(own, BYTES[sha256]) for sha256, digest in recorded.items())


def own_digest(own: Own, image: Image.Image) -> str:
    tensors = {"pixel_values": own.pixels(image), "num_patches": torch.tensor(1)}
    if own.kind != "gemma3":
        made = own.processor.image_processor(images=[image], return_tensors="pt")
        tensors = {"pixel_values": own.pixels(image), GRID: made[GRID][0]}
    return digest_of(
        {
            name: (str(each.dtype).removeprefix("torch."), tuple(each.shape), raw(each))
            for name, each in tensors.items()
        }
    )


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def differences(own: Own, turns: list[Turn], *, swap: bool = False) -> list[float]:
    """Of each turn the mean |Δ log p| of its answer, recorded against transformers. `swap`: the
    last image of the path is another one of the same size, where there is one."""
    out = []
    for turn in turns:
        images = prefix_images(turns, turn.index, turn.path_tokens)
        ids = engine_ids(path(turns, turn.index), images)
        shown = [BYTES[image.sha256] for image in images]
        if swap:
            shown[-1] = noise(99, *shown[-1].size)
        logprobs = own.logprobs(ids.tolist(), shown)[turn.prompt_tokens - 1 :]
        out.append(float(np.abs(logprobs - turn.logprobs).mean()))
    return out


def main() -> None:
    kind = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, kind)
        MODELS[kind](checkpoint)
        if kind == "gemma3":  # with tools
            (checkpoint / "chat_template.jinja").write_text(gemma_template(), encoding="utf-8")
        sys.stdout.write(json.dumps(asyncio.run(found(kind, checkpoint))))


if __name__ == "__main__":
    main()
