"""The settings of a relay worker."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from proxy.machine.secrecy import with_secret


class WorkerConfig(BaseSettings):
    """The worker's settings. Precedence: command line > environment > default."""

    model_config = SettingsConfigDict(extra="forbid", env_prefix="AGENTIC_WORKER_")

    proxy: str = Field(pattern="^wss?://.+")
    """The proxy's address, `ws://HOST:PORT` or `wss://HOST`."""
    engine: str = Field(pattern="^https?://.+")
    """The URL of the vLLM on this machine, which runs with `--enable-scale-out`."""
    engine_api_key: SecretStr | None = None
    """The engine's API key. Not on the command line."""
    engine_api_key_file: Path | None = None
    """In place of `engine_api_key`: a file that contains it."""
    model: Path
    """Folder of the checkpoint that the engine serves; the proxy was given the same model."""
    name: str = Field(default_factory=socket.gethostname, min_length=1, max_length=128)
    """The worker's name at the proxy, unique there. Default: the host's name."""
    token: SecretStr
    """The proxy's `relay.token`. Not on the command line."""
    token_file: Path | None = None
    """In place of `token`: a file that contains it."""
    max_calls: int = Field(default=256, ge=1)
    """Maximum number of concurrent calls to the engine; the proxy routes others elsewhere."""
    weights_url: str | None = None
    """The trainer's `engine.publish`, as this machine reaches it: the URL from which the engine's
    weights are pulled. Credentials come from this machine's environment. None: a trainer that
    publishes weights gets an error."""
    weights_folder: Path = Path("agentic-worker-weights")
    """Folder for pulled weights, which the engine reads under the same path and no other worker
    uses. It needs twice the size of the weights."""
    silence_s: float = Field(default=15.0, gt=0)
    """Seconds without any message after which a connection counts as lost."""
    drain_s: float = Field(default=300.0, ge=0)
    """Seconds that calls in flight get to finish after SIGTERM."""

    @model_validator(mode="before")
    @classmethod
    def _read_secrets(cls, data: Any) -> Any:
        return with_secret(with_secret(data, "token"), "engine_api_key")
