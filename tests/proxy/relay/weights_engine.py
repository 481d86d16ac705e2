"""A scripted engine that takes weights from a file, by vLLM's routes, and published versions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.engines.scripted import ScriptedEngine
from proxy.weights.publication import (
    HEAD_BYTES,
    MANIFEST,
    File,
    Files,
    Manifest,
    StoredPiece,
    Tensor,
    encode_manifest,
    new_digest,
    title,
)
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
            ]
        )
        return app

    @web.middleware
    async def _failing(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path in self.fails:
            return web.json_response({"error": self.fails.pop(request.path)}, status=500)
        self.requests.append(request.path)
        response: web.StreamResponse = await handler(request)
        return response

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

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

    async def _reset(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})


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

    def file(self, name: str) -> Path:
        return self.folder / name / "full-00000.safetensors"
