"""The recording proxy as a process of its own, so that it can be killed and restarted.

Invariant: it ends with us, however we end (`proxy/engines/guard.py`); a restart listens on the
same port and opens the same store, so agents that retry continue the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from proxy.client import ProxyClient
from proxy.engines import guard
from trainer.config import ProxyServerConfig
from trainer.errors import ConfigError, TrainerError

POLL_S = 0.1  # between looks at whether a starting proxy answers
LOG_TAIL_BYTES = 2000

STOP_GRACE_S = 10.0
"""For the proxy to cut the calls in flight and commit what they sampled."""


class ProxyProcess:
    """Example: proxy = ProxyProcess(config.proxy_server, settings, folder.logs / "proxy.log")"""

    def __init__(
        self,
        config: ProxyServerConfig,
        settings: dict[str, Any],
        folder: Path,
        admin_key: str | None = None,
    ) -> None:
        """`settings`: keys of `proxy.config.ProxyConfig` that the run decides. `admin_key`: None:
        a new one."""
        self._config = config
        self._port = config.port or _free_port(config.host)
        self._settings = settings
        self._folder = folder
        self.log = folder / "proxy.log"
        self._process: asyncio.subprocess.Process | None = None
        self.admin_key = admin_key or secrets.token_urlsafe(32)
        self.url = f"http://{config.host}:{self._port}"

    @property
    def pid(self) -> int:
        """Of the guard that ends with us and ends the proxy with it."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns when it answers.

        Raises:
            ConfigError: its port is in use.
            TrainerError: it ended, or did not answer in time.
        """
        check_port(self._config.host, self._port)
        file = self._folder / "proxy.yaml"
        file.write_text(yaml.safe_dump(self._settings | self._address()))
        command = [sys.executable, "-m", "proxy", "serve", "--config", str(file)]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"AGENTIC_PROXY_ADMIN_KEY": self.admin_key},
                start_new_session=True,  # Ctrl-C reaches us alone; we end it after the agents
            )
        await self._answers(self._process)

    def _address(self) -> dict[str, Any]:
        address: dict[str, Any] = {"host": self._config.host, "port": self._port}
        if (reached_by := self._config.llm_proxy_ip) is not None:
            address["public_url"] = f"http://{reached_by}:{self._port}"
        return address

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        """What it serves from its next start on: `proxy.config.EngineConfig` each."""
        self._settings["engines"] = list(engines)

    async def stop(self) -> None:
        """Returns when it is gone."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def wait(self) -> str:
        """Until it ends; how it did."""
        assert self._process is not None
        code = await self._process.wait()
        return f"code {code}: {self.tail()} (log: {self.log})"

    def tail(self) -> str:
        text = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it printed nothing"

    async def _answers(self, process: asyncio.subprocess.Process) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.start_timeout_s
        async with ProxyClient(self.url, self.admin_key, timeout_s=2.0) as client:
            while not await client.ready():
                with contextlib.suppress(TimeoutError):
                    code = await asyncio.wait_for(process.wait(), POLL_S)
                    raise TrainerError(
                        f"the proxy ended at start with code {code}: {self.tail()} "
                        f"(all of it in {self.log})"
                    )
                if asyncio.get_running_loop().time() > deadline:
                    await self.stop()
                    raise TrainerError(
                        f"the proxy did not answer within {self._config.start_timeout_s:g} s "
                        f"(proxy_server.start_timeout_s); see {self.log}"
                    )


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raises ConfigError when something else listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"proxy_server.port={port}: cannot listen on {host}:{port} ({error.strerror}); "
                "choose another, or 0 for a free one"
            ) from error
