"""A scripted engine that takes weights and adapters from files, by vLLM's routes, and published
versions. An adapter's file holds the log-probability of every token under it."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.engines.segment_layout import HEAD_BYTES, new_digest, title
from proxy.engines.vllm import GENERATE
from proxy.extras.relay.weights.adapter_folders import adapter_digest
from proxy.extras.relay.weights.publication import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    MANIFEST,
    Adapter,
    File,
    Files,
    Manifest,
    ProbeScores,
    StoredPiece,
    Tensor,
    encode_manifest,
)
from proxy.testing.scripted_engine import ScriptedEngine
from tests.file_server import FileServer


class WeightsEngine(ScriptedEngine):
    """Serves `weights`, the bytes of the file that it loaded last."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.label = "default"
        self.weights: bytes = b""
        self.paused = False
        self.updating = False
        self.held: list[str | None] | None = None
        self.requests: list[str] = []
        self.slow_update: Handler | None = None
        """Handles the next updates of weights."""
        self.world_size: Handler | None = None
        self.base_score = -1.0
        """The log-probability of every token without an adapter."""
        self.scores: dict[str, float] = {}
        """Name of an adapter → the log-probability of every token under it."""
        self.ignores_adapters = False
        self.missing: set[str] = set()
        """Paths that it does not serve."""
        self.lacked = asyncio.Event()
        """Set when a call has named an adapter that it lacks."""
        self.fails: dict[str, str] = {}
        """Path of a request → why it fails, once."""

    def build_app(self) -> web.Application:
        app = super().build_app()
        app.middlewares.append(self._failing)
        app.add_routes(
            [
                web.get("/get_world_size", self._world_size),
                web.post("/collective_rpc", self._rpc),
                web.post("/init_weight_transfer_engine", self._stage),
                web.post("/start_weight_update", self._start),
                web.post("/update_weights", self._update),
                web.post("/finish_weight_update", self._finish),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/v1/load_lora_adapter", self._load_adapter),
                web.post("/v1/unload_lora_adapter", self._unload_adapter),
            ]
        )
        return app

    @web.middleware
    async def _failing(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in self.fails:
            return web.json_response({"error": self.fails.pop(request.path)}, status=500)
        if request.path in self.missing:
            raise web.HTTPNotFound
        self.requests.append(request.path)
        if request.path == GENERATE:
            body = orjson.loads(await request.read())
            if "prompt_logprobs" in body["sampling_params"]:
                return self._scored(body)
        response: web.StreamResponse = await handler(request)
        if (request.path, response.status) == (GENERATE, 404):
            self.lacked.set()
        return response

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    def restart(self) -> None:
        """Makes it as it was started."""
        self.weights, self.label, self.version = b"", "default", 0
        self.adapters.clear()

    def _scored(self, body: dict[str, Any]) -> web.Response:
        name = body.get("model")
        if name not in (None, self.model) and name not in self.adapters:
            return web.json_response({"error": {"message": f"no model {name}"}}, status=404)
        score = self.base_score
        if name in self.adapters and not self.ignores_adapters:
            score = self.scores[name]
        scores = [None, *({str(each): {"logprob": score}} for each in body["token_ids"][1:])]
        return web.json_response({"prompt_logprobs": scores, "choices": []})

    async def _models(self, _: web.Request) -> web.Response:
        own = {"id": self.model, "max_model_len": self.max_context_tokens, "parent": None}
        adapters = [{"id": name, "parent": self.model} for name in self.adapters]
        return web.json_response({"data": [own, *adapters]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        info = orjson.loads(await request.read())
        folder = Path(info["lora_path"])
        assert orjson.loads((folder / ADAPTER_CONFIG).read_bytes())["r"] == 1
        self.scores[info["lora_name"]] = float((folder / ADAPTER_FILE).read_text())
        self.adapters[info["lora_name"]] = self.script
        return web.Response(text="Success")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        self.adapters.pop(orjson.loads(await request.read())["lora_name"])
        return web.Response(text="Success")

    async def _world_size(self, request: web.Request) -> web.StreamResponse:
        if self.world_size is not None:
            return await self.world_size(request)
        return web.json_response({"world_size": 2})

    async def _rpc(self, request: web.Request) -> web.Response:
        method = orjson.loads(await request.read())["method"]
        if method == "__dir__":
            return web.json_response({"results": [["held_dtypes"] if self.held else []] * 2})
        return web.json_response({"results": [self.held, self.held]})

    async def _stage(self, request: web.Request) -> web.Response:
        init = orjson.loads(await request.read())["init_info"]
        line = orjson.dumps({"digest": init["digest"], "reason": ""}) + b"\n"
        with _opened(init["report"]) as pipe:
            for _ in range(2):
                os.write(pipe, line)
        return web.json_response({})

    async def _start(self, _: web.Request) -> web.Response:
        if self.updating:
            return web.json_response({"error": "an update is already active"}, status=500)
        self.updating = True
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.StreamResponse:
        if self.slow_update is not None:
            return await self.slow_update(request)
        info = orjson.loads(await request.read())["update_info"]
        assert self.paused
        content = Path(info["path"]).read_bytes()
        assert len(content) == info["size_bytes"]
        self.weights = content[HEAD_BYTES:]
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        self.label = orjson.loads(await request.read())["weight_version"]
        self.version = int(self.label) if self.label.isdigit() else self.version
        self.updating = False
        return web.json_response({})

    async def _sleep(self, _: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({})

    async def _wake(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({})

    async def _reset(self, request: web.Request) -> web.Response:
        everything = {"reset_running_requests": "true", "reset_external": "true"}
        return web.json_response({"success": self.paused and dict(request.query) == everything})


def scores_of(score: float) -> ProbeScores:
    """Of a text whose tokens all have this log-probability."""
    return ProbeScores((5, 6, 7), (score, score), 1e-3)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        yield pipe
    finally:
        os.close(pipe)


class Publications:
    """A folder in which versions of one tensor are published."""

    def __init__(self, folder: Path, server: FileServer) -> None:
        self.folder = folder
        self.server = server

    def add(self, version: int, content: bytes, *, dtype: str = "uint8") -> str:
        """Publishes a full version, trained in float32 unless in uint8. Returns its name."""
        name = f"run-a/v{version:06d}-{version:012x}"
        size = {"uint8": 1, "bfloat16": 2, "float32": 4}[dtype]
        trained = "uint8" if dtype == "uint8" else "float32"
        tensor = Tensor("w", dtype, (len(content) // size,), trained)
        digest = new_digest()
        digest.update(title(tensor.name, tensor.dtype, tensor.shape) + content)
        file = File("full-00000.safetensors", len(content), hashlib.sha256(content).hexdigest())
        piece = StoredPiece(0, 0, tensor.count, 0, 0, len(content), "raw")
        full = Files((file,), (piece,))
        manifest = Manifest(name, version, digest.hexdigest(), (tensor,), full=full)
        self.file(name).parent.mkdir(parents=True)
        self.file(name).write_bytes(content)
        (self.folder / name / MANIFEST).write_bytes(encode_manifest(manifest))
        return name

    def add_adapter(
        self,
        version: int,
        score: float,
        *,
        base: float | None = None,
        check: str | None = None,
        label: str | None = None,
        policy: str = "shop",
    ) -> tuple[str, str]:
        """Publishes a version of an adapter under which every token has this log-probability, on
        weights under which it is `base`. Returns its name and the engines' name of it."""
        at = version + (1000 if label else 0)
        name, content = f"run-a/v{version:06d}-{at:012x}", str(score).encode()
        served = f"{policy}@{label or version}.{hashlib.sha256(content).hexdigest()[:16]}"
        file = File(ADAPTER_FILE, len(content), hashlib.sha256(content).hexdigest())
        config = '{"r": 1}'
        adapter = Adapter(served, config, None if base is None else scores_of(base), check)
        digest = adapter_digest(file.sha256, config)
        manifest = Manifest(
            name, version, digest, (), Files((file,), ()), probe=scores_of(score), adapter=adapter
        )
        (self.folder / name).mkdir(parents=True)
        (self.folder / name / ADAPTER_FILE).write_bytes(content)
        (self.folder / name / MANIFEST).write_bytes(encode_manifest(manifest))
        return name, served

    def file(self, name: str) -> Path:
        return self.folder / name / "full-00000.safetensors"
