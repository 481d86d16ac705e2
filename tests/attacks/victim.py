"""The proxy under attack: a process with a scripted engine, its log, its memory and its record."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from proxy.client import ProxyClient
from proxy.config import RenderingConfig
from proxy.engines.scripted import ScriptedEngine, text_script
from proxy.records import TurnStatus
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint

ADMIN_KEY = "admin-key-of-the-attack"
START_TIMEOUT_S = 120.0
ADDRESS = re.compile(r"([\w.]+):(\d+)")


@dataclass(slots=True)
class Victim:
    host: str
    port: int
    pid: int
    log: Path
    store: Path
    engine: ScriptedEngine
    control: ProxyClient
    peak_rss_bytes: int = field(default=0)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def rss_bytes(self) -> int:
        """Resident memory now; the peak of all calls is kept."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        rss = int(status.partition("VmRSS:")[2].split()[0]) * 1024
        self.peak_rss_bytes = max(self.peak_rss_bytes, rss)
        return rss

    def tracebacks(self) -> list[str]:
        """The last line of each traceback in the log, and the last place in our code."""
        parts = self.log.read_text(errors="replace").split("Traceback (most recent call last)")
        return [_last_of_traceback(part) for part in parts[1:]]

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
    checkpoint = write_checkpoint(folder / "model")
    rendering = Rendering(load_tokenizer(checkpoint), RenderingConfig())
    script = text_script(
        lambda prompt: f"That is {len(prompt)} characters, thank you.",
        decode=rendering.tokenizer.decode,
        encode=rendering.tokenizer.encode,
        end_ids=rendering.stop_token_ids[:1],
    )
    async with ScriptedEngine(script, remember_calls=False) as engine:
        store, log, config = folder / "sessions.db", folder / "proxy.log", folder / "proxy.yaml"
        given = {
            "model": str(checkpoint),
            "port": 0,
            "engines": [{"url": engine.url}],
            "store": f"sqlite:///{store}",
            **settings,
        }
        config.write_text(yaml.safe_dump(given))
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy", "serve", "--config", str(config)),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": ADMIN_KEY},
            )
        try:
            host, port = await _address(process, log)
            async with ProxyClient(f"http://{host}:{port}", ADMIN_KEY) as control:
                yield Victim(host, port, process.pid, log, store, engine, control)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _address(process: asyncio.subprocess.Process, log: Path) -> tuple[str, int]:
    assert process.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        while line := (await process.stdout.readline()).decode():
            _, found, rest = line.partition("http://")
            if found:
                host, port = ADDRESS.match(rest).groups()  # type: ignore[union-attr]
                return host, int(port)
    raise RuntimeError(f"the proxy did not start: {log.read_text(errors='replace')[-2000:]}")


def _last_of_traceback(part: str) -> str:
    lines = part.splitlines()
    last = next((line for line in lines[1:] if line and not line.startswith(" ")), "")[:200]
    ours = [line.strip() for line in lines if "/proxy/" in line and line.startswith("  File ")]
    return f"{last} ({ours[-1] if ours else 'not in our code'})"
