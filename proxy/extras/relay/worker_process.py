"""The process of `agentic-worker`: reads its settings and runs the worker."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from pydantic import ValidationError

from proxy.engines.vllm import VllmEngine
from proxy.errors import ConfigurationError
from proxy.extras.relay.fingerprint import fingerprint
from proxy.extras.relay.worker import RelayWorker
from proxy.extras.relay.worker_config import WorkerConfig
from proxy.machine.secrecy import shown_value

SECRETS = frozenset({"token", "engine_api_key"})
"""Not on the command line, which every process of the machine can read; `--NAME-file` is."""


async def run_worker(config: WorkerConfig) -> None:
    """Serves the engine until SIGTERM or SIGINT.

    Raises:
        ConfigurationError: the model's folder or the engine cannot be used.
        WorkerRefused: the proxy refuses the worker for good.
    """
    key = config.engine_api_key
    engine = VllmEngine(config.engine, api_key=key.get_secret_value() if key else None)
    try:
        await engine.check()
        worker = RelayWorker(engine, fingerprint(config.model), config)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, worker.stop)
        await worker.run()
    finally:
        await engine.close()


def worker_config(given: dict[str, Any]) -> WorkerConfig:
    """The settings from the command line (`given`) and the environment.

    Raises:
        ConfigurationError: one is missing or invalid; the message names its flag and variable.
    """
    try:
        return WorkerConfig(**given)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a contradiction between settings, which names them
            raise ConfigurationError(first["msg"].removeprefix("Value error, ")) from error
        key = str(first["loc"][0])
        value = "" if first["type"] == "missing" else shown_value(first["loc"], first["input"])
        flag = f"--{key.replace('_', '-')}{'-file' if key in SECRETS else ''} or "
        raise ConfigurationError(
            f"{flag}AGENTIC_WORKER_{key.upper()}: {first['msg']}{value}"
        ) from error
