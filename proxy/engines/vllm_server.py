"""Runs a vLLM server as a child process, with the token-in/token-out and weight-update routes.

Invariant: the server never outlives this process. A small guard process (`guard.py`) ends the
server and all its descendants on `stop`, and when this process dies, also by `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from pydantic import Field

from proxy.engines import guard, vllm_early, vllm_platform
from proxy.engines.address import EngineAddress
from proxy.engines.vllm_early import EarlyServer
from proxy.engines.vllm_key import RequireKey
from proxy.engines.vllm_launch import EarlyOrders
from proxy.engines.vllm_log import cause_of_end
from proxy.engines.vllm_nodes import ServerPart, node_environment
from proxy.errors import ConfigurationError, EngineError
from proxy.extra_registry import BINARY_ROUTE_SERVER
from proxy.machine.port import HeldPort, http_url, loopback
from proxy.machine.secrecy import inherited, pipe_with
from proxy.machine.swept_folder import swept_folder
from proxy.settings.reaching import StartTimeout
from proxy.settings.section import Common

_PORT_SETTING = "engine port"
HEALTH_INTERVAL_S = 0.2
"""Time between health checks of a starting server, which does not report that it is ready."""
STOP_GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for the highest rank of adapters."""
LOADED_PER_SLOT = 4
"""Number of adapters in memory per adapter that is sampled with. One that has lost its place is
read again from its files."""
LOG_BYTES = 64 * 2**20
"""Where a cause is looked for; the first error is the cause, however long the log has become."""


class VllmConfig(StartTimeout):
    """Settings of a vLLM server.

    Example: VllmConfig(max_context_tokens=4096, args=("--tensor-parallel-size", "2"))
    """

    max_context_tokens: Common[int | None] = Field(None, ge=2)
    """Maximum number of tokens of a call's prompt and answer together; None: the checkpoint's own
    limit."""
    max_sequences: int | None = Field(None, ge=1)
    """Maximum number of answers that one server samples at a time; None: vLLM's default."""
    kv_cache_gib: int | None = Field(None, ge=1)
    """Memory in GiB for keys and values of each server; None: 1 on a CPU, and on GPUs what
    `gpu_memory_share` leaves."""
    gpu_memory_share: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory for each server. In mode `colocated` the trainer needs the rest.
    None: vLLM's default."""
    nice: int = Field(0, ge=0, le=19)
    """On a CPU: how far the server gives way to the machine's other processes (nice value). At 10,
    agents that are ready to run go first, so that more of their calls share each step of the
    engine, which costs nearly the same for many calls as for one."""
    args: Common[tuple[str, ...]] = ()
    """Additional arguments of vLLM's server, such as `["--tensor-parallel-size", "2"]`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of vLLM's server, in addition to those of the process that starts
    it."""
    sleep: Common[bool] = False
    """Mode `colocated` on GPUs only: engines free their GPU memory while the trainer needs it
    (vLLM's sleep mode)."""
    lora_rank: int | None = Field(None, ge=1, le=512)
    """Highest rank of the LoRA adapters that the server samples with; None: it serves none, except
    in a run with `model.lora`, whose rank it then is."""
    lora_slots: int = Field(4, ge=1)
    """Number of adapters that the server samples with at the same time; calls of further ones wait.
    During an update a policy has two."""
    routed_experts: bool = False
    """Return the experts that the router of each layer chose, if a call asks for them (vLLM's
    `--enable-return-routed-experts`); only for mixture-of-experts models."""
    weight_transfer: str | None = None
    """Name of the backend by which the server receives new weights; None: it receives none."""


class VllmServer:
    """Example:
    async with VllmServer(VllmConfig(), Path("models/qwen3"), log=Path("vllm.log")) as server:
        engine = VllmEngine(server.url)
    """

    def __init__(
        self,
        config: VllmConfig,
        model: Path,
        *,
        log: Path,
        dtype: str = "auto",
        seed: int = 0,
        served_model_name: str | None = None,
        host: str | None = None,
        port: int = 0,
        part: ServerPart | None = None,
    ) -> None:
        """`log` is the file to which the server's standard output and error are appended. `port` 0
        is any free port. `host` None: only this machine. `part`: of a server that is divided over
        nodes; None: the whole server.

        Raises:
            ConfigurationError: vLLM is not installed, or the model or port is unusable.
        """
        vllm_platform.installed()
        if not (model / "config.json").is_file():
            raise ConfigurationError(
                f"model: {model} has no config.json; give the folder of a checkpoint"
            )
        self.config = config
        self.log = log
        self.host = host = host or loopback()
        self.part = part
        self._held: HeldPort | None = HeldPort(_PORT_SETTING, host, port)
        self.port = self._held.port
        self._dtype = dtype
        self._arguments = ["--model", str(model), "--dtype", dtype, "--seed", str(seed)]
        if served_model_name is not None:
            self._arguments += ["--served-model-name", served_model_name]
        self._address = EngineAddress(http_url(host, self.port), key=secrets.token_urlsafe(32))
        self._process: asyncio.subprocess.Process | EarlyServer | None = None
        self._temporary = contextlib.ExitStack()
        """Its folder for temporary files, from its start to its end."""
        self._log_begin = 0

    @property
    def url(self) -> str:
        """The URL with the server's key, which every client of the server needs."""
        return self._address.with_key

    @property
    def answers(self) -> bool:
        """Whether it answers at `url`. A part that has only workers does not."""
        return self.part is None or self.part.answers

    @property
    def url_file(self) -> Path:
        """The file that contains the URL while the server runs, for the same user's commands."""
        return self.log.with_suffix(".url")

    async def start(self) -> None:
        """Starts the server and returns when it is healthy; a part that has only workers, at once.

        Raises:
            EngineError: the server ended, or was not healthy within `start_timeout_s`; the message
                contains the cause from its log.
            ConfigurationError: its port was taken while it was stopped.
        """
        self._held = self._held or HeldPort(_PORT_SETTING, self.host, self.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()  # an early server may end before it has opened it
        self._log_begin = self.log.stat().st_size  # after those of servers that this one replaces
        asked = asked_environment(self.config, self._dtype)
        environment = {**inherited(), **asked}
        own = self._temporary_files(asked)
        if self.part is not None or self.host == "::1":  # gloo looks for 127.0.0.1 if nobody says
            own |= {k: v for k, v in node_environment(self.host).items() if k not in environment}
        early = vllm_early.taken(asked, vllm_platform.installed().late)
        if early is not None:
            self._process = early
            orders = EarlyOrders(
                key=self._address.key or "",
                arguments=self._all_arguments,
                environment=dict((environment | own).items() - early.environment.items()),
                log=str(self.log.absolute()),
            )
            early.order(orders)
        else:
            self._process = await self._new_process(environment | own)
        if not self.answers:
            return
        try:
            await self._until_healthy()
        except BaseException:
            await self.stop()
            raise
        if self.config.nice and vllm_platform.installed().shares_cores:
            self._give_way(self.config.nice)
        self.url_file.touch(mode=0o600)
        self.url_file.write_text(self.url + "\n", encoding="utf-8")

    def _temporary_files(self, asked: Mapping[str, str]) -> dict[str, str]:
        """The variables by which the server's temporary files are in a folder that ends with it, or
        is swept at the start of another one. What PyTorch's compiler keeps there stays."""
        parent = socket_folder()
        parent.mkdir(mode=0o700, exist_ok=True)
        self._temporary.close()  # of a server that has ended by itself
        folder = str(self._temporary.enter_context(swept_folder("", parent)))
        compiled = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        files = {"TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        given = os.environ.keys() & {"TORCHINDUCTOR_CACHE_DIR"} | asked.keys()
        return {
            "VLLM_RPC_BASE_PATH": folder,
            **{name: value for name, value in files.items() if name not in given},
        }

    def _give_way(self, nice: int) -> None:
        """Not before it is healthy, or starting would take longer."""
        assert self._process is not None
        guard = Path(f"/proc/{self._process.pid}/task/{self._process.pid}")
        with contextlib.suppress(OSError):  # it has just ended
            for server in guard.joinpath("children").read_text(encoding="utf-8").split():
                own = os.getpriority(os.PRIO_PROCESS, int(server))  # as that of the agents
                os.setpriority(os.PRIO_PGRP, int(server), min(own + nice, 19))
                # Where Linux groups a session's processes, that counts only within the group.
                Path(f"/proc/{server}/autogroup").write_text(str(nice), encoding="utf-8")

    async def _new_process(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log, pipe_with(self._address.key or "") as key_fd:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__),
                *(str(os.getpid()), str(STOP_GRACE_S)),
                *self.command(key_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(key_fd,),
                start_new_session=True,  # Ctrl-C reaches us alone
            )

    def command(self, key_fd: int) -> list[str]:
        """The command line of the server, which reads its key from `key_fd`."""
        launch = [sys.executable, "-m", "proxy.engines.vllm_launch", str(key_fd)]
        return launch + self._all_arguments

    @property
    def _all_arguments(self) -> list[str]:
        address = ["--host", self.host, "--port", str(self.port)]
        part = [] if self.part is None else self.part.arguments
        return self._arguments + address + server_arguments(self.config) + part

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
        self._temporary.close()
        if self._held is not None:
            self._held.close()
            self._held = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def last_words(self) -> str:
        """The cause of the server's end, from what its log says since it was started."""
        with self.log.open("rb") as log:
            log.seek(self._log_begin)
            return cause_of_end(log.read(LOG_BYTES).decode(errors="replace"))

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
            timeout_s = self.config.start_timeout_s
            await asyncio.wait(
                {ended, healthy}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if healthy.done():
                return await healthy
            why = f"exit code {await ended}" if ended.done() else f"silent for {timeout_s:.0f} s"
            raise EngineError(f"vLLM did not start ({why}): {self.last_words()} (log: {self.log})")
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
    """The folder of the temporary files of our vLLM servers, a folder for each server: Unix sockets
    above all, by which their processes talk. A process
    that can connect to them can send tokens in an engine's name, so agents must not see the
    folder."""
    return Path(tempfile.gettempdir(), f"agentic-engines-{os.getuid()}")


def server_arguments(config: VllmConfig) -> list[str]:
    transfer = config.weight_transfer
    optional = {
        "--max-model-len": config.max_context_tokens,
        "--max-num-seqs": config.max_sequences,
        "--gpu-memory-utilization": config.gpu_memory_share,
        "--weight-transfer-config": json.dumps({"backend": transfer}) if transfer else None,
    }
    argv = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    argv += ["--disable-uvicorn-access-log"]
    argv += ["--middleware", BINARY_ROUTE_SERVER] if BINARY_ROUTE_SERVER is not None else []
    argv += ["--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"]
    argv += vllm_platform.installed().server_arguments(config.kv_cache_gib)
    argv += ["--enable-sleep-mode"] if config.sleep else []
    argv += ["--enable-return-routed-experts"] if config.routed_experts else []
    argv += _lora_arguments(config.lora_rank, config.lora_slots)
    for flag, value in optional.items():
        argv += [flag, str(value)] if value is not None else []
    return argv + list(config.args)


def _lora_arguments(rank: int | None, slots: int) -> list[str]:
    if rank is None:
        return []
    allowed = next(each for each in LORA_RANKS if each >= rank)
    loaded = slots * LOADED_PER_SLOT
    return [
        *("--enable-lora", "--max-lora-rank", str(allowed)),
        *("--max-loras", str(slots), "--max-cpu-loras", str(loaded)),
    ]


def server_environment(config: VllmConfig, dtype: str = "auto") -> dict[str, str]:
    return {**inherited(), **asked_environment(config, dtype)}


def asked_environment(config: VllmConfig, dtype: str = "auto") -> dict[str, str]:
    """What a server's environment has besides, or in place of, that of this process. `dtype`: the
    type in which it computes."""
    ours = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if config.lora_rank is not None:
        ours["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    ours |= vllm_platform.installed().server_environment(dtype, config.kv_cache_gib)
    return {**ours, **config.env}
