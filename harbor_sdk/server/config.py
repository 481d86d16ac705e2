"""Settings of `harbor-server`: the command line wins over the environment (HARBOR_SERVER_*)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_ENVIRONMENT = "harbor_sdk.environment:LocalEnvironment"


class ServerConfig(BaseModel):
    """Example: ServerConfig(token=kept_token(state_dir), state_dir=state_dir, concurrency=4)"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8090, ge=0, le=65535)
    """0: any free port; it is printed at start."""
    state_dir: Path = Path("harbor-server")
    """Folder of the run table, uploaded tasks, trials and the token."""
    token: str = Field(min_length=16, repr=False)
    """Clients send it with every request. The command makes one if none is given."""
    task_roots: list[Path] = Field(default_factory=list)
    """`task_path` in a request must lie below one of these."""
    environment: str = DEFAULT_ENVIRONMENT
    """Environment of requests that name none: Harbor's name for it, or `module:Class`."""
    environment_kwargs: dict[str, object] = Field(default_factory=dict)
    """Arguments of the default environment. Those of a request win over them."""
    max_queued: int = Field(default=1000, ge=1)
    """Runs that may wait. Further submissions get a 429."""
    concurrency: int = Field(default=8, ge=1)
    """Concurrent runs in one environment that `environment_concurrency` does not name."""
    environment_concurrency: dict[str, int] = Field(default_factory=dict)
    """Concurrent runs by the environment's name. Example: {"docker": 4, "modal": 64}"""
    max_archive_mb: int = Field(default=100, ge=1)
    max_task_mb: int = Field(default=1000, ge=1)
    """Bound on the size of an unpacked archive."""
    keep_s: float = Field(default=7 * 86400, gt=0)
    """Finished runs and their folders are removed after this time."""

    def slots(self, environment: str) -> int:
        """Number of runs that may be in this environment at once."""
        return self.environment_concurrency.get(environment, self.concurrency)
