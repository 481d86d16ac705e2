"""The section `relay` of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, model_validator

from proxy.machine.secrecy import with_secret
from proxy.settings.section import Section


class RelayConfig(Section):
    """Engines behind a firewall, which connect to the proxy (`agentic-worker`)."""

    token: SecretStr | None = None
    """The secret by which workers authenticate. Without one the relay is off."""
    token_file: Path | None = None
    """In place of `token`: a file that contains it."""
    window: int = Field(default=64, ge=1)
    """Number of a call's frames (engine steps) that a worker sends before the proxy has taken them;
    later ones wait in the worker's memory."""
    grace_s: float = Field(default=30.0, ge=0)
    """Seconds that a disconnected worker has to reconnect before its calls are cut."""
    silence_s: float = Field(default=15.0, gt=0)
    """Seconds without any message, including pongs, after which a connection counts as lost."""

    @model_validator(mode="before")
    @classmethod
    def _read_token(cls, data: Any) -> Any:
        return with_secret(data, "token")
