"""Section `proxy_server`, and the recording proxy as a separate process.

Invariant: the proxy ends with the run, even if the run is killed (`proxy/engines/guard.py`). A
restarted proxy listens on the same socket, which the run keeps, so that nobody can take its port,
and opens the same store: agents that retry continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from agent_loop.trial.config import RecordingConfig
from proxy.client import ProxyClient, ProxyClientError
from proxy.config import ENVIRONMENT_PREFIX, RenderingConfig, ToolsConfig
from proxy.engines import guard
from proxy.machine.direct_hosts import with_direct_hosts
from proxy.machine.port import bind_socket, family, http_url
from proxy.machine.secrecy import LatePipe
from proxy.settings.late_section import LateSection
from proxy.settings.reaching import ListeningAddress, StartTimeout
from proxy.settings.section import Common
from trainer.errors import TrainerError

POLL_S = 0.1  # seconds between two checks whether a starting proxy is ready
LOG_TAIL_BYTES = 2000
PORT_SETTING = "proxy_server.port"

ALSO_DECIDED = (
    "engines",
    "admin_key",
    "admin_key_file",
    "store_password_file",
    "public_url",
    "peer_url",
    "workers",
)
"""Settings that take the place of those that a run decides, or are right for another proxy only."""
STOP_GRACE_S = 10.0
"""Seconds for the proxy to end the calls in flight and to store their turns."""


class ProxyServerConfig(RecordingConfig, RenderingConfig, StartTimeout, ListeningAddress):
    """Section `proxy_server`. Example: ProxyServerConfig(port=8000, renderer="template")"""

    url: Common[str | None] = None
    """URL of a running proxy, whose admin key is in AGENTIC_PROXY_ADMIN_KEY, or in the file that
    AGENTIC_PROXY_ADMIN_KEY_FILE names; None: start a proxy. The engines of a running proxy must be
    listed in `engine.urls`, so that they receive the weights, or be relay workers that pull them
    (`engine.publish`); the run does not restart them."""
    llm_proxy_ip: Common[str | None] = None
    """Address at which agents on other machines reach the proxy; None: `host`."""
    rules: Annotated[Sequence[Any], LateSection("proxy.extras.rules.rules:Rules", is_list=True)] = (
        Field(default_factory=list)
    )
    """Searches that the started proxy makes in every recorded turn. They mark its session, and may
    end the trial or set its reward to 0 (docs/view.md)."""
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    """Tools of a provider that the started proxy runs."""
    start_timeout_s: float = Field(60.0, gt=0)


class ProxyProcess:
    """Example: proxy = ProxyProcess(config.proxy_server, settings, folder.logs / "proxy.log")"""

    def __init__(
        self,
        config: ProxyServerConfig,
        settings: dict[str, Any],
        folder: Path,
        admin_key: str | None = None,
    ) -> None:
        """`settings` are the keys of `proxy.config.ProxyConfig` that the run decides. Without an
        `admin_key` a new one is made."""
        self._config = config
        self._port = config.port
        self._settings = settings
        self._folder = folder
        self.log = folder / "proxy.log"
        self._process: asyncio.subprocess.Process | None = None
        self._begun: LatePipe | None = None
        self._socket: socket.socket | None = None
        """Shared with each process that serves the proxy. Connections wait while none does."""
        self.admin_key = admin_key or secrets.token_urlsafe(32)

    @property
    def url(self) -> str:
        """Known from the first `start` on."""
        return http_url(self._config.host, self._port)

    @property
    def pid(self) -> int:
        """The process id of the proxy's guard, which ends the proxy when this process ends."""
        assert self._process is not None
        return self._process.pid

    async def begin(self) -> None:
        """Starts its process, which imports what it needs and waits for its settings."""
        self._begun = LatePipe()
        if self._socket is None:
            self._socket = socket.socket(family(self._config.host))
        with self.log.open("ab") as log, self._begun.to_child() as config_fd:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *(sys.executable, "-m", "proxy", "serve", "--config", f"/dev/fd/{config_fd}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment({*self._settings, *self._address(), *ALSO_DECIDED}),
                pass_fds=(config_fd, self._socket.fileno()),
                start_new_session=True,  # the run handles Ctrl-C: the agents end first
            )

    async def start(self) -> None:
        """Gives the proxy its settings, and returns when it answers. Calls `begin` if nobody did.

        Raises:
            ConfigurationError: its port is in use.
            TrainerError: it ended, or did not answer in time.
        """
        if self._begun is None:
            await self.begin()
        assert self._socket is not None
        if not self._socket.getsockname()[1]:
            bind_socket(self._socket, PORT_SETTING, self._config.host, self._port)
            self._port = self._socket.getsockname()[1]
        assert self._process is not None
        assert self._begun is not None
        begun, self._begun = self._begun, None
        begun.write(
            yaml.safe_dump(self._settings | self._address() | {"admin_key": self.admin_key})
        )
        await self._answers(self._process)

    def _address(self) -> dict[str, Any]:
        address: dict[str, Any] = {"host": self._config.host, "port": self._port}
        if self._socket is not None:
            address["listen_fd"] = self._socket.fileno()
        if (reached_by := self._config.llm_proxy_ip) is not None:
            address["public_url"] = http_url(reached_by, self._port)
        return address

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        """Sets the engines that the proxy uses from its next start on, each a
        `proxy.config.EngineConfig`."""
        self._settings["engines"] = list(engines)

    async def stop(self) -> None:
        """Ends the proxy, and returns when it has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
        if self._begun is not None:
            self._begun.close()
            self._begun = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def wait(self) -> str:
        """Returns when it has ended; the result says how."""
        assert self._process is not None
        code = await self._process.wait()
        return f"code {code}: {self.tail()} (log: {self.log})"

    def tail(self) -> str:
        text = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "without output"

    async def _answers(self, process: asyncio.subprocess.Process) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.start_timeout_s
        async with ProxyClient(self.url, self.admin_key, timeout_s=2.0) as client:
            while not await self._serves(client):
                with contextlib.suppress(TimeoutError):
                    code = await asyncio.wait_for(process.wait(), POLL_S)
                    raise TrainerError(
                        f"the proxy ended at start with code {code}: {self.tail()} "
                        f"(log: {self.log})"
                    )
                if asyncio.get_running_loop().time() > deadline:
                    await self.stop()
                    raise TrainerError(
                        f"the proxy did not answer within {self._config.start_timeout_s:g} s "
                        f"(proxy_server.start_timeout_s); see {self.log}"
                    )

    async def _serves(self, client: ProxyClient) -> bool:
        """Whether it answers, and one of its engines, too, if it has engines of its own. Relay
        workers connect only when it answers."""
        if self._settings.get("engines") or "relay" not in self._settings:
            return await client.ready()
        with contextlib.suppress(ProxyClientError):
            await client.health()
            return True
        return False


def _environment(decided: Collection[str]) -> dict[str, str]:
    """This process's environment without the variables of settings that the run decides, because a
    proxy's environment has precedence over its YAML."""

    def is_decided(variable: str) -> bool:
        prefix, _, rest = variable.upper().partition(ENVIRONMENT_PREFIX)
        return not prefix and rest.split("__")[0].lower() in decided

    undecided = {name: value for name, value in os.environ.items() if not is_decided(name)}
    return with_direct_hosts(undecided)
