"""What a screenshot in each turn costs: a conversation whose history has ever more pictures, beside
a pass-through of the same bodies, and beside the proxy that shows them as texts.

    python -m benchmarks.proxy.images

The engine is scripted, in a process of its own, whose time is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.proxy.targets import Target, fake_vllm, first_line, pass_through, started
from proxy.machine.port import free_port
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine
from proxy.testing.scripted_images import PICTURE
from tests.proxy.checkpoint import PICTURES, write_checkpoint

PICTURE_BYTES = 77_000
"""Of a PNG of 1024 by 768 with a page of text."""
TURNS = 30
SESSIONS = 3
ANSWER = [75] * 20


@contextmanager
def recording(folder: Path, engine: str, name: str, **environment: str) -> Iterator[Target]:
    port = free_port("127.0.0.1")
    argv = ["serve", "--engine", engine, "--model", str(folder / "model"), "--port", str(port)]
    argv += ["--auto-create", "--store", f"sqlite:///{folder}/{name}.sqlite"]
    with started([sys.executable, "-m", "proxy", *argv], **environment) as process:
        url = f"http://127.0.0.1:{port}/s@S@/v1/chat/completions"
        yield Target(name, url, process)


async def until_ready(target: Target, *, sees: bool) -> None:
    """Until its engine has been checked: a text of an image has more tokens than its mark."""
    picture = {"type": "image_url", "image_url": {"url": url(PICTURE + b"probe")}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}], "max_tokens": 1}
    async with aiohttp.ClientSession() as http:
        for number in range(600):
            address = target.url.replace("/s@S@/", f"/probe-{number}/")
            try:
                async with http.post(address, data=orjson.dumps(body)) as response:
                    answer = orjson.loads(await response.read())
                if response.status == 200 and (answer["usage"]["prompt_tokens"] < 40) == sees:
                    return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"{target.name} is not ready")


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def bodies(session: int) -> Iterator[tuple[list[Any], bytes]]:
    """The history and the request of each turn."""
    noise = random.Random(session)
    history: list[Any] = []
    for turn in range(TURNS):
        data = PICTURE + noise.randbytes(PICTURE_BYTES)
        picture = {"type": "image_url", "image_url": {"url": url(data)}}
        text = {"type": "text", "text": f"Turn {turn}: what is on the screen?"}
        history.append({"role": "user", "content": [text, picture]})
        yield history, orjson.dumps({"model": "m", "messages": history, "max_tokens": 20})


async def cost(targets: list[Target]) -> dict[str, list[list[float]]]:
    """Milliseconds of processor time by target, turn and session."""
    found: dict[str, list[list[float]]] = {t.name: [[] for _ in range(TURNS)] for t in targets}
    async with aiohttp.ClientSession() as http:
        for session in range(SESSIONS):
            histories = [bodies(session) for _ in targets]
            for turn in range(TURNS):
                for target, each in zip(targets, histories, strict=True):
                    history, body = next(each)
                    address = target.url.replace("/s@S@/", f"/images-{session}/")
                    before = target.cpu_s()
                    async with http.post(address, data=body) as response:
                        answer = orjson.loads(await response.read())
                        assert response.status == 200, answer
                    found[target.name][turn].append((target.cpu_s() - before) * 1e3)
                    history.append(answer["choices"][0]["message"])
    return found


async def serve_engine(model: Path) -> None:
    token = load_tokenizer(model).image_token_id
    engine = ScriptedEngine(lambda _: ANSWER, image_token=token, remember_calls=False)
    print(await engine.start(), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proxy.images", description=__doc__)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine is not None:
        asyncio.run(serve_engine(given.engine))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_checkpoint(folder / "model", template=PICTURES)
        argv = [sys.executable, "-m", __spec__.name, "--engine", str(folder / "model")]
        engine = first_line(stack.enter_context(started(argv, subprocess.PIPE)))
        seeing = stack.enter_context(recording(folder, engine, "images"))
        unseen = {"AGENTIC_PROXY_RENDERING__IMAGES": "false"}
        texts = stack.enter_context(recording(folder, engine, "texts", **unseen))
        plain = stack.enter_context(pass_through(stack.enter_context(fake_vllm())))
        asyncio.run(until_ready(seeing, sees=True))
        asyncio.run(until_ready(texts, sees=False))
        found = asyncio.run(cost([seeing, texts, plain]))
    print(f"ms of processor time per call, a picture of {PICTURE_BYTES} bytes in each turn")
    for turn in (1, 2, 10, 20, TURNS):
        medians = {name: statistics.median(times[turn - 1]) for name, times in found.items()}
        print(f"turn {turn}: " + ", ".join(f"{name} {ms:.1f}" for name, ms in medians.items()))


if __name__ == "__main__":
    main()
