"""What a run tells a relay worker that it starts on another node, as one line of standard input."""

from __future__ import annotations

from pathlib import Path

import orjson
from pydantic import Field, SecretStr

from proxy.engines.vllm_server import VllmConfig
from proxy.settings.section import Section


class WorkerOrder(Section):
    """What a run tells a worker.

    Example: WorkerOrder(proxy="ws://10.0.0.7:8000", token="…", name="relay-0", model="/models/q")
    """

    proxy: str
    token: SecretStr
    name: str
    model: Path
    engine: VllmConfig = VllmConfig()
    dtype: str = "auto"
    """The type of the engine's weights."""
    seed: int = 0
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engine."""
    drain_s: float = 5.0

    def line(self) -> bytes:
        """The line of standard input, with the token."""
        token = {"token": self.token.get_secret_value()}
        return orjson.dumps(self.model_dump(mode="json") | token) + b"\n"
