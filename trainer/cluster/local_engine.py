"""A vLLM server of the run on this machine, started anew when it ended."""

from __future__ import annotations

import json
from collections.abc import Callable

from proxy.engines.vllm_server import VllmOptions, VllmServer
from trainer.config import TrainerConfig
from trainer.errors import TrainerError
from trainer.run.folder import RunFolder

MakeServer = Callable[[VllmOptions], VllmServer]


def engine_options(config: TrainerConfig, folder: RunFolder, number: int) -> VllmOptions:
    """Of replica `number`; on any free port."""
    engine = config.engine
    return VllmOptions(
        model=config.model.path,
        log=folder.logs / f"engine-{number}.log",
        dtype=config.engine_dtype,
        max_context_tokens=engine.max_context_tokens,
        max_sequences=engine.max_sequences,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_share=engine.gpu_memory_share,
        weight_transfer=json.dumps({"backend": engine.weight_transfer}),
        seed=config.trainer.seed + number,
        extra_args=(*engine.args, *(["--enable-sleep-mode"] if engine.sleep else [])),
        environment=engine.env,
        start_timeout_s=engine.start_timeout_s,
    )


class LocalReplica:
    """Example: replica = LocalReplica(engine_options(config, folder, 0))"""

    def __init__(self, options: VllmOptions, make_server: MakeServer = VllmServer) -> None:
        self._options = options
        self._make_server = make_server
        self._server: VllmServer | None = None
        self.url = ""

    async def start(self) -> None:
        self._server = self._make_server(self._options)
        await self._server.start()
        self.url = self._server.url

    async def wait(self) -> str:
        if self._server is None:
            raise TrainerError("the engine was not started")
        code = await self._server.wait()
        return f"exit code {code}: {self._server.last_words()} (log: {self._options.log})"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
