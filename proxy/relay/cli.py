r"""`agentic-worker`: serves the engine on this machine to a proxy somewhere else.

    AGENTIC_WORKER_TOKEN=… agentic-worker --proxy wss://proxy.example.org \
        --engine http://127.0.0.1:8001 --model /models/qwen3 --name gpu-0

It connects out, so the engine's machine needs no open port. It ends with status 1 and one line
when the proxy refuses it for good, and connects again whenever the network fails.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from pathlib import Path

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.engines.vllm import VllmEngine
from proxy.errors import ConfigurationError, EngineError
from proxy.relay.fingerprint import fingerprint
from proxy.relay.worker import RelayWorker, WorkerRefused, WorkerSettings


class WorkerConfig(BaseSettings):
    """Precedence: command line > environment (`AGENTIC_WORKER_…`) > default."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="AGENTIC_WORKER_")

    proxy: str = Field(pattern="^wss?://.+")
    """The proxy's address, `ws://HOST:PORT` or `wss://HOST`."""
    engine: str = Field(pattern="^https?://.+")
    """The vLLM server on this side, started with `--enable-scale-out`."""
    engine_api_key: SecretStr | None = None
    model: Path
    """Folder of the checkpoint that the engine serves; the proxy was given the same model."""
    name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    """Names the worker at the proxy; each needs its own. Default: the host's name."""
    token: SecretStr
    """What the proxy was given as `relay.token`. By the environment, not the command line."""
    max_calls: int = Field(default=256, ge=1)
    """Calls that the engine is given at a time; past it the proxy asks another."""
    silence_s: float = Field(default=15.0, gt=0)
    """A connection over which nothing came for so long is dead."""
    drain_s: float = Field(default=300.0, ge=0)
    """How long calls in flight may still take after SIGTERM."""


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        asyncio.run(_run(_config()))
    except (ConfigurationError, EngineError, WorkerRefused) as error:
        sys.exit(f"agentic-worker: {error}")


async def _run(config: WorkerConfig) -> None:
    key = config.engine_api_key
    engine = VllmEngine(config.engine, api_key=key.get_secret_value() if key else None)
    try:
        await engine.check()
        settings = WorkerSettings(
            proxy=config.proxy,
            name=config.name,
            token=config.token.get_secret_value(),
            max_calls=config.max_calls,
            silence_s=config.silence_s,
            drain_s=config.drain_s,
        )
        worker = RelayWorker(engine, fingerprint(config.model), settings)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, worker.stop)
        await worker.run()
    finally:
        await engine.close()


def _config() -> WorkerConfig:
    parser = argparse.ArgumentParser(prog="agentic-worker", description=__doc__)
    for name, field in WorkerConfig.model_fields.items():
        if field.annotation is not SecretStr and name != "engine_api_key":
            parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS)
    try:
        return WorkerConfig(**vars(parser.parse_args()))
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        said = "" if first["type"] == "missing" else f" (value: {first['input']!r})"
        raise ConfigurationError(
            f"--{key.replace('_', '-')} or AGENTIC_WORKER_{key.upper()}: {first['msg']}{said}"
        ) from error
