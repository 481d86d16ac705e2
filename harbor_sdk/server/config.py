"""How `harbor-server` is set up: command line over environment (HARBOR_SERVER_*).

Invariant: off loopback there is a token, or there is no server.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_ENVIRONMENT = "harbor_sdk.environment:LocalEnvironment"


class ServerConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8090, ge=0, le=65535)
    """0: any free port, printed at start."""
    state_dir: Path = Path("harbor-server")
    """The run table, uploaded tasks and trials' folders."""
    token: str | None = None
    task_roots: list[Path] = Field(default_factory=list)
    """`task_path` in a request must lie below one of these."""
    environment: str = DEFAULT_ENVIRONMENT
    """For requests that name none: Harbor's name or `module:Class`."""
    environment_kwargs: dict[str, object] = Field(default_factory=dict)
    """For that default environment; a request's own are merged over them."""
    max_queued: int = Field(default=1000, ge=1)
    """Runs that wait; past it: 429."""
    concurrency: int = Field(default=8, ge=1)
    """Runs at once in one environment, where `environment_concurrency` has no other figure."""
    environment_concurrency: dict[str, int] = Field(default_factory=dict)
    """By the environment's name. Example: {"docker": 4, "modal": 64}"""
    max_archive_mb: int = Field(default=100, ge=1)
    max_task_mb: int = Field(default=1000, ge=1)
    """Of an archive when unpacked."""
    keep_s: float = Field(default=7 * 86400, gt=0)
    """Finished runs and their folders are removed after this."""

    @model_validator(mode="after")
    def _guarded(self) -> ServerConfig:
        if self.token is None and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines: set a token "
                "(HARBOR_SERVER_TOKEN), or bind 127.0.0.1"
            )
        if self.token is not None and len(self.token) < 16:
            raise ValueError(f"the token has {len(self.token)} characters: give 16 or more")
        return self

    def slots(self, environment: str) -> int:
        return self.environment_concurrency.get(environment, self.concurrency)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
