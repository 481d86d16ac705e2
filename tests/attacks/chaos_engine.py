"""An engine without a model that a run starts instead of vLLM: HOST PORT KEY_FD CHECKPOINT.

It accepts weights and reports their version. Each token is a function of the call's seed, of its
position and of the version of the weights, so that an answer is the same wherever it went on, and
another one if it was sampled with weights of the wrong version.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from aiohttp import web

from proxy.config import RenderingConfig
from proxy.engines.vllm import FIRST_SEED
from proxy.machine.secrecy import from_pipe
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine
from proxy.testing.scripted_wires import ScriptedCall
from tests.trainer.fake_engine import FakeEngine

LETTERS = "abcd"
TOKENS = 8
"""Of each answer, besides its end."""
TOKEN_DELAY_S = 0.002
WEIGHTS = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/reset_prefix_cache", "/collective_rpc", "/get_world_size"),
    *("/sleep", "/wake_up"),
)


class ChaosEngine(ScriptedEngine):
    def __init__(self, checkpoint: Path) -> None:
        super().__init__(lambda _: (), remember_calls=False, token_delay_s=TOKEN_DELAY_S)
        rendering = Rendering(load_tokenizer(checkpoint), RenderingConfig())
        self._letters = [rendering.tokenizer.encode(letter)[0] for letter in LETTERS]
        self._end = rendering.stop_token_ids[0]
        self._weights = FakeEngine()

    def build_app(self) -> web.Application:
        app = super().build_app()
        for route in WEIGHTS:
            app.router.add_route("*", route, self._control)
        return app

    async def _control(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        answer = self._weights.answer(request.path_qs, body)
        if request.path == "/sleep":
            self._resumed.clear()
        elif request.path == "/wake_up":
            self._resumed.set()
        if self._weights.version.isdecimal():
            self.version = int(self._weights.version)
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    async def _sample(self, call: ScriptedCall) -> AsyncIterator[int]:
        await self._resumed.wait()
        seed = call.sampling.get("extra_args", {}).get(FIRST_SEED, call.sampling.get("seed"))
        limit = call.sampling["max_tokens"]
        while call.finish_reason is None:
            await self._wait_for_token(call)
            if call.abort.is_set():
                call.finish_reason = "abort"
                return
            position = len(call.prompt_ids) + len(call.answer_ids)
            rng = random.Random(f"{seed} {position} {self.version}")
            token = self._end if position % TOKENS == 0 else rng.choice(self._letters)
            call.answer_ids.append(token)
            call.versions.append(self.version)
            if token == self._end:
                call.finish_reason = "stop"
            elif len(call.answer_ids) == limit:
                call.finish_reason = "length"
            elif call.stream:
                yield len(call.answer_ids)


async def main(host: str, port: int, key_fd: int, checkpoint: Path) -> None:
    from_pipe(key_fd)
    await ChaosEngine(checkpoint).start(host, port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
