"""The relay workers of a run: starts them, waits until the proxy has them, restarts those that end.

A worker gets the proxy's address and the relay token by its standard input (`node.py`), and
for commands of a user's own the path of a file with the token in `AGENTIC_WORKER_TOKEN_FILE`.

Invariant: each start of a worker has a name of its own at the proxy, so that a predecessor which is
not yet known to be dead there refuses nobody. A worker that ends before it was ever connected, or
more than `relay.restarts` times, ends the run, with the last lines of its log.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from proxy.client import ProxyClient, patiently
from proxy.engines.vllm_server import VllmConfig
from proxy.http.web_guard import host_of
from proxy.machine.secrecy import without_credentials
from trainer.cluster.cluster import Cluster, WorkerProcess
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.replica_server import replica_engine
from trainer.engine import EnginesConfig
from trainer.errors import TrainerError
from trainer.extras.relay.config import NUMBER, RelaySection, RelayWorkersConfig
from trainer.extras.relay.order import WorkerOrder
from trainer.extras.relay.worker_process import WorkerCommand
from trainer.run.control import first_to_end
from trainer.run.folder import RunFolder

POLL_S = 0.5
"""Seconds between two looks at the proxy's engines, while a worker starts."""
MAX_WAIT_S = 60.0
"""Longest wait before a worker is started again."""
WEIGHTS_URL = "AGENTIC_WORKER_WEIGHTS_URL"
"""Where a worker pulls weights from. An entry's `env` has precedence over `engine.publish`."""


@dataclass(frozen=True, slots=True)
class _Place:
    """One worker, from start to start."""

    number: int
    """Among all workers of the run."""
    entry: RelayWorkersConfig
    of_entry: int
    """Its number among the workers of its entry."""

    def filled(self, text: str) -> str:
        return text.replace(NUMBER, str(self.of_entry))


class RelayWorkers:
    """Example:
    workers = RelayWorkers(config, folder, cluster, print)
    ...                                  # the proxy starts with `workers.proxy_settings`
    await control.wait_for(workers.start(proxy.url, client))
    """

    def __init__(
        self,
        config: ProcessesConfig,
        folder: RunFolder,
        cluster: Cluster,
        say: Callable[[str], None],
    ) -> None:
        """`say` is called with a line for the user."""
        assert isinstance(config.relay, RelaySection)
        self._config = config
        self._relay = config.relay
        self._folder = folder
        self._cluster = cluster
        self._say = say
        self._token = secrets.token_urlsafe(32)
        self._token_file = folder.path.absolute() / "relay-token"
        self._proxy_url = ""
        self._client: ProxyClient | None = None
        self._running: dict[int, WorkerProcess] = {}
        self._connected: set[int] = set()
        """Numbers of the workers that were connected once."""
        self._waiting: dict[str, asyncio.Event] = {}
        """Name at the proxy → set when the proxy has it."""
        self._someone_waits = asyncio.Event()
        self.lives: asyncio.Task[None] | None = None
        """A task that never returns, but raises a TrainerError when a worker keeps ending."""

    @property
    def proxy_settings(self) -> dict[str, Any]:
        """The keys of `proxy.config.ProxyConfig` that let the workers in; none without workers."""
        relay = self._relay
        if not relay.workers:
            return {}
        hosts = [host_of(relay.url)] if relay.url is not None else []
        return {"relay": {"token": self._token}, "allowed_hosts": hosts}

    async def start(self, proxy_url: str, client: ProxyClient) -> None:
        """Starts all workers, and returns when the proxy has them.

        Raises:
            TrainerError: a worker ended, or was not connected within `relay.start_timeout_s`.
        """
        places = list(self._places())
        if not places:
            return
        self._client = client
        self._proxy_url = self._relay.url or f"ws://{urlsplit(proxy_url).netloc}"
        _write_secret(self._token_file, self._token)
        self._say(f"relay: starting {len(places)} workers, which connect to {self._proxy_url}")
        everyone = asyncio.Event()
        works = [self._look(), *(self._life(place, everyone) for place in places)]
        self.lives = asyncio.create_task(first_to_end(works))
        connected = asyncio.create_task(everyone.wait())
        try:
            await asyncio.wait({connected, self.lives}, return_when=asyncio.FIRST_COMPLETED)
            if self.lives.done():
                self.lives.result()
        finally:
            connected.cancel()

    async def stop(self) -> None:
        """Ends the workers, and returns when those processes that this run started have ended."""
        if self.lives is not None:
            self.lives.cancel()
            await asyncio.gather(self.lives, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._running.values()))
        self._running.clear()
        self._token_file.unlink(missing_ok=True)

    def _places(self) -> Iterator[_Place]:
        number = 0
        for entry in self._relay.workers:
            for of_entry in range(entry.count):
                yield _Place(number, entry, of_entry)
                number += 1

    async def _life(self, place: _Place, everyone: asyncio.Event) -> None:
        """Keeps one worker running. Never returns."""
        relay, how = self._relay, ""
        for start in range(1, relay.restarts + 2):
            name = f"relay-{place.number}" + (f".{start}" if start > 1 else "")
            worker = self._running[place.number] = self._worker(place, name)
            how = await self._served(worker, name, place, everyone)
            await worker.stop()
            if place.number not in self._connected:
                raise TrainerError(f"relay.workers: {name} {how}")
            if start <= relay.restarts:
                wait_s = min(MAX_WAIT_S, 2.0 ** (start - 1))
                self._say(f"warning: {name} {how}; starting another one in {wait_s:g} s")
                await asyncio.sleep(wait_s)
        raise TrainerError(
            f"relay-{place.number} ended {relay.restarts + 1} times (relay.restarts); it {how}"
        )

    async def _served(
        self, worker: WorkerProcess, name: str, place: _Place, everyone: asyncio.Event
    ) -> str:
        """Starts the worker, and waits until it is connected, and then until it has ended; returns
        how."""
        try:
            await worker.start()
        except TrainerError as error:
            return f"could not be started: {error}"
        ended = asyncio.create_task(worker.wait())
        arrived = asyncio.create_task(self._arrival(name))
        timeout_s = self._relay.start_timeout_s
        try:
            await asyncio.wait(
                {ended, arrived}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended.done() and not arrived.done():
                await worker.stop()
                how = await ended
                return f"was not connected within {timeout_s:g} s (relay.start_timeout_s): {how}"
            if arrived.done():
                self._note_arrival(name, place, everyone)
            return f"ended with {await ended}"
        finally:
            arrived.cancel()
            ended.cancel()

    def _note_arrival(self, name: str, place: _Place, everyone: asyncio.Event) -> None:
        self._connected.add(place.number)
        count, total = len(self._connected), self._relay.count
        self._say(f"relay: {name} is connected ({count} of {total} workers)")
        if count == total:
            everyone.set()

    async def _arrival(self, name: str) -> None:
        """Returns when the proxy has the worker."""
        arrived = self._waiting[name] = asyncio.Event()
        self._someone_waits.set()
        try:
            await arrived.wait()
        finally:
            del self._waiting[name]

    async def _look(self) -> None:
        """Looks which workers the proxy has, while someone waits for one. Never returns."""
        assert self._client is not None
        patience_s = self._config.proxy_server.patience_s
        while True:
            await self._someone_waits.wait()
            engines = await patiently(self._client.engines, patience_s)
            for name in {each["name"] for each in engines} & self._waiting.keys():
                self._waiting[name].set()
            if not self._waiting:
                self._someone_waits.clear()
            await asyncio.sleep(POLL_S)

    def _worker(self, place: _Place, name: str) -> WorkerProcess:
        config, entry = self._config, place.entry
        engine, env = replica_engine(config), dict(entry.env)
        if config.engine.publish is not None:
            if not config.model.policy:  # from the pulled file
                engine = engine.model_copy(update={"weight_transfer": "shm"})
            env.setdefault(WEIGHTS_URL, without_credentials(config.engine.publish))
        order = WorkerOrder(
            proxy=self._proxy_url,
            token=SecretStr(self._token),
            name=name,
            model=entry.model or config.model.path.absolute(),
            engine=_served_alone(engine),
            dtype=config.engine.served_dtype(config.model),
            seed=config.trainer.seed + config.engine.replicas + place.number,
            env={key: place.filled(value) for key, value in env.items()},
        )
        log = self._folder.logs.absolute() / f"relay-{place.number}.log"
        if not entry.command:
            return self._cluster.relay_worker(entry, order, log)
        own = {
            "AGENTIC_WORKER_PROXY": order.proxy,
            "AGENTIC_WORKER_NAME": name,
            "AGENTIC_WORKER_MODEL": str(order.model),
            "AGENTIC_WORKER_TOKEN_FILE": str(self._token_file),
        }
        argv = [place.filled(word) for word in entry.command]
        return WorkerCommand(argv, order, log, own | order.env)


def _served_alone(engine: EnginesConfig) -> VllmConfig:
    """The settings of one server."""
    return VllmConfig.model_validate(engine.model_dump(include=set(VllmConfig.model_fields)))


def _write_secret(path: Path, secret: str) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(secret + "\n")
