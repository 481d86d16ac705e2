"""The proxy under attack: a process with a scripted engine, and its record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proxy.client import ProxyClient
from proxy.config import RenderingConfig
from proxy.records import TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from proxy.testing.scripted_engine import ScriptedEngine, text_script
from tests.attacks.server import Server, running_server
from tests.proxy.checkpoint import PICTURES, write_checkpoint

ADMIN_KEY = "admin-key-of-the-attack"


@dataclass(slots=True)
class Victim(Server):
    store: Path
    checkpoint: Path
    engine: ScriptedEngine
    control: ProxyClient

    async def unclosed_turns(self, trial_ids: list[str]) -> list[str]:
        """Turns that are open though no call is in flight, and sessions that cannot be read."""
        found = []
        for trial_id in trial_ids:
            _, turns = await self.control.get_turns(trial_id)
            found += [f"{trial_id}#{t.index}" for t in turns if t.status is TurnStatus.OPEN]
        return found


@asynccontextmanager
async def running_victim(folder: Path, **settings: Any) -> AsyncIterator[Victim]:
    """`settings`: further keys of the proxy's configuration."""
    checkpoint = write_checkpoint(folder / "model", template=PICTURES)
    rendering = Rendering(load_tokenizer(checkpoint), RenderingConfig())
    script = text_script(
        lambda prompt: f"That is {len(prompt)} characters, thank you.",
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=rendering.stop_token_ids[:1],
    )
    reads = rendering.image_token
    async with ScriptedEngine(script, remember_calls=False, image_token=reads) as engine:
        store, log, config = folder / "sessions.db", folder / "proxy.log", folder / "proxy.yaml"
        given = {
            "model": str(checkpoint),
            "port": 0,
            "engines": [{"url": engine.url}],
            "store": f"sqlite:///{store}",
            **settings,
        }
        config.write_text(yaml.safe_dump(given))
        serve = ("proxy", "serve", "--config", str(config))
        async with (
            running_server(*serve, log=log, AGENTIC_PROXY_ADMIN_KEY=ADMIN_KEY) as at,
            ProxyClient(at.url, ADMIN_KEY) as control,
        ):
            yield Victim(at.host, at.port, at.pid, log, store, checkpoint, engine, control)
