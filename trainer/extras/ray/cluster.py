"""A run on a Ray cluster: engines, ranks and optionally the proxy are named actors in one placement
group; the driver awaits them and holds no model.

There is one bundle for each node of each engine and one for each rank; with `share_gpus`, one for
each engine and its rank together. Invariant: everything is reserved before anything is started;
otherwise the run ends with an error of one line. After the exit of `ray_cluster` no actor and no
placement group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agent_loop.extras.ray.here import RayHere
from agent_loop.processes.listening import ListeningPorts
from proxy.engines.vllm_server import VllmServer, socket_folder
from trainer.cluster.cluster import ProxyService
from trainer.cluster.config import ClusterConfig, ProcessesConfig
from trainer.cluster.proxy_server import ProxyProcess
from trainer.cluster.rank_zero import RankRequest, RankZero, SendRequest
from trainer.cluster.replica_server import replica_server
from trainer.engine import GPUS_OF_AN_ENGINE
from trainer.errors import ConfigError, TrainerError
from trainer.extras.ray.actors import (
    ActorGoneError,
    EngineActor,
    ProxyActor,
    RankActor,
    awaited,
    end,
    started,
    until_end,
)
from trainer.extras.ray.replica import PartActor, RayReplica
from trainer.extras.ray.worker import RayWorker
from trainer.extras.relay.config import RelaySection, RelayWorkersConfig
from trainer.extras.relay.order import WorkerOrder
from trainer.policy.parallelism import Seat
from trainer.run.control import RunControl, first_to_end
from trainer.run.folder import RunFolder

Bundle = dict[str, float]
T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
RAY_DOES_NOT_START = (OSError, RuntimeError, ValueError, ray.exceptions.RayError)
"""Errors of `ray.init` if no cluster answers, versions differ, or Ray cannot start here."""


@asynccontextmanager
async def ray_cluster(
    config: ProcessesConfig,
    folder: RunFolder,
    control: RunControl,
    server: type[VllmServer] = VllmServer,
) -> AsyncIterator[RayCluster]:
    """Connects to the cluster and reserves what the run needs.

    Raises:
        ConfigError: no cluster answers, or it has not enough free resources.
    """
    with _connected(config):
        wanted = bundles(config, has_gpus="GPU" in ray.cluster_resources())
        _check_nodes(config, wanted)
        group = placement_group(wanted, strategy=config.cluster.strategy)
        try:
            await control.wait_for(_reserved(group, wanted, config.cluster))
            yield RayCluster(config, folder, control, group, wanted, server)
        finally:
            remove_placement_group(group)


def bundles(config: ProcessesConfig, *, has_gpus: bool) -> list[Bundle]:
    """The bundles to reserve: first those for engines, of which each has its nodes one after the
    other, then those for ranks."""
    cluster, ranks = config.cluster, config.trainer.ranks
    wanted = config.engine.tensor_parallel if has_gpus else 0
    gpus = wanted if cluster.engine_gpus is None else cluster.engine_gpus
    if cluster.share_gpus:
        return [_bundle(cluster.engine_cpus + cluster.rank_cpus, gpus)] * ranks
    replicas = 0 if config.engine.urls else config.engine.replicas
    nodes = cluster.engine_nodes
    engines = [_bundle(cluster.engine_cpus, gpus // nodes)] * (replicas * nodes)
    return engines + [_bundle(cluster.rank_cpus, min(gpus, 1))] * ranks


def _check_nodes(config: ProcessesConfig, wanted: Sequence[Bundle]) -> None:
    nodes, workers = config.cluster.engine_nodes, config.engine.tensor_parallel
    # vLLM takes workers for those of one node by the number of its devices, and a CPU is one.
    if 1 < nodes < workers and "GPU" not in wanted[0]:
        raise ConfigError(
            f"cluster.engine_nodes={nodes}: without GPUs, vLLM can have one worker on each node, "
            f"not {workers // nodes}; set {GPUS_OF_AN_ENGINE} in engine.args to {nodes}"
        )


def _bundle(cpus: float, gpus: int) -> Bundle:
    return {"CPU": cpus or 0.01} | ({"GPU": float(gpus)} if gpus else {})  # Ray refuses {}


class RayCluster:
    """A run's actors on a Ray cluster; created by `ray_cluster`."""

    starts_engines_early = False  # an engine and a rank can share a GPU

    def __init__(
        self,
        config: ProcessesConfig,
        folder: RunFolder,
        control: RunControl,
        group: Any,
        reserved: Sequence[Bundle],
        server: type[VllmServer],
    ) -> None:
        self._config = config
        self._folder = folder
        self._control = control
        self._group = group
        self._reserved = reserved
        self._server = server
        self._ray = RayHere.find()
        self._listening = ListeningPorts([os.getpid(), *self._ray.processes])

    @property
    def private_paths(self) -> list[Path]:
        return [socket_folder(), self._ray.folder, *self._ray.tokens]

    def private_ports(self) -> frozenset[int]:
        engines = {urlsplit(url).port or 80 for url in self._config.engine.urls}
        return self._listening.now() | self._ray.ports | engines

    def replica(self, number: int) -> RayReplica:
        nodes = range(self._config.cluster.engine_nodes)
        return RayReplica([self._part(number, node) for node in nodes])

    def proxy(self, settings: dict[str, Any]) -> ProxyService:
        if self._config.cluster.proxy == "driver":
            return ProxyProcess(self._config.proxy_server, settings, self._folder.logs)
        return RayProxy(self, settings, secrets.token_urlsafe(32))

    def relay_worker(self, entry: RelayWorkersConfig, order: WorkerOrder, log: Path) -> RayWorker:
        return RayWorker(self._config.cluster, entry, order, log)

    def trainer(self, probe: Sequence[int]) -> AbstractAsyncContextManager[RankZero]:
        return self._trainer(probe)

    def _part(self, number: int, node: int) -> PartActor:
        name = f"engine-{number}" + (f"-node-{node}" if node else "")
        make = partial(self._start_engine, name, number, node)
        return PartActor(name, partial(self.placed, make))

    def _start_engine(self, name: str, number: int, node: int) -> Any:
        """A new actor; its server is not started yet."""
        cluster = self._config.cluster
        make = replica_server(self._config, self._folder, number, self._server, node=node)
        bundle = number * cluster.engine_nodes + node
        return self._actor(EngineActor, name, bundle, cluster.engine_cpus, make)

    def start_proxy(self, settings: dict[str, Any], admin_key: str, port: int) -> Any:
        """A new actor; its server is not started yet."""
        config, logs = self._config.proxy_server, self._folder.logs.absolute()
        return self._actor(ProxyActor, "proxy", 0, 0.0, config, settings, logs, admin_key, port)

    async def placed(self, make: Callable[[], Any], whose: str) -> Any:
        """A new actor, once it runs on a node. It is created again if Ray sent it to a node that
        was lost.

        Raises:
            TrainerError: the node of its bundle is lost, and no other has room for the bundle.
            ActorGoneError: the actor could not be created.
        """
        timeout_s = self._config.cluster.room_timeout_s
        lost = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    actor = make()
                    try:
                        await awaited(actor.__ray_ready__.remote(), whose)
                        return actor
                    except ActorGoneError as error:
                        ray.kill(actor)
                        if error.at_fault:
                            raise
                        lost = f"{error}; "
        except TimeoutError:
            raise TrainerError(
                f"{lost}{whose} found no node with room for its bundle in {timeout_s:g} s "
                f"(cluster.room_timeout_s): {_room()}; start the run again to continue "
                "from the last checkpoint"
            ) from None

    @asynccontextmanager
    async def _trainer(self, probe: Sequence[int]) -> AsyncIterator[RankZero]:
        actors = [self._start_rank(rank) for rank in range(self._config.trainer.ranks)]
        try:
            await self._control.wait_for(_join(actors, probe))
            others = asyncio.create_task(
                first_to_end(_follow(rank, actor) for rank, actor in enumerate(actors) if rank)
            )
            self._control.watch(others)
            try:
                yield RankZero(_to_actor(actors[0]), others)
            finally:
                others.cancel()
                await asyncio.wait({others})
        finally:
            for actor in actors:
                ray.kill(actor)

    def _start_rank(self, rank: int) -> Any:
        shared = self._config.cluster.share_gpus
        bundle = rank if shared else len(self._reserved) - self._config.trainer.ranks + rank
        cpus = self._config.cluster.rank_cpus
        return self._actor(RankActor, f"rank-{rank}", bundle, cpus, self._config)

    def _actor(self, cls: type, name: str, bundle: int, cpus: float, *args: Any) -> Any:
        gpus = self._reserved[bundle].get("GPU", 0.0) if cls is not ProxyActor else 0.0
        try:
            return (
                ray.remote(cls)
                .options(
                    name=name,
                    namespace=self._config.cluster.namespace,
                    num_cpus=cpus,
                    num_gpus=gpus / 2 if self._config.cluster.share_gpus else gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=bundle
                    ),
                )
                .remote(*args)
            )
        except ValueError as error:
            raise ConfigError(
                f"cluster.namespace={self._config.cluster.namespace!r}: {error}; choose another one"
            ) from error


class RayProxy:
    """The proxy's actor; after its end, another one at the same address replaces it."""

    def __init__(self, cluster: RayCluster, settings: dict[str, Any], admin_key: str) -> None:
        self._cluster = cluster
        self._settings = settings
        self._port = 0
        self._actor: Any = None
        self.admin_key = admin_key
        self.url = ""

    async def begin(self) -> None:
        """Nothing: its actor is placed after those of the engines."""

    async def start(self) -> None:
        """Raises TrainerError if the actor could not be placed on the same node again."""
        settings = self._settings, self.admin_key, self._port
        make = partial(self._cluster.start_proxy, *settings)
        place = partial(self._cluster.placed, make, "the proxy's actor")
        self._actor, url = await started(self._actor, place, "the proxy's actor")
        if self.url not in ("", url):
            raise TrainerError(
                f"the proxy was at {self.url} and is now at {url}, because its node was lost; "
                "start the run again to continue from the last checkpoint"
            )
        self.url, self._port = url, urlsplit(url).port or 0

    async def wait(self) -> str:
        how, self._actor = await until_end(self._actor, "the proxy's actor")
        return how

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        self._settings = self._settings | {"engines": list(engines)}
        if self._actor is not None:
            with contextlib.suppress(ActorGoneError):  # the next one starts with these settings
                await awaited(self._actor.set_engines.remote(engines), "the proxy's actor")

    async def stop(self) -> None:
        await end(self._actor, "the proxy's actor")


def _to_actor(actor: Any) -> SendRequest:
    async def send(request: RankRequest[T]) -> T:
        answer: T = await awaited(actor.ask.remote(request), _whose(0))
        return answer

    return send


def _whose(rank: int) -> str:
    return f"rank {rank} of the trainer"


async def _join(actors: Sequence[Any], probe: Sequence[int]) -> None:
    """Returns when all ranks have built their models."""
    seats: list[Seat | None] = [None]
    if len(actors) > 1:
        meeting = await awaited(actors[0].meeting.remote(), _whose(0))
        seats = [Seat(rank, len(actors), meeting, local_rank=0) for rank in range(len(actors))]
    joins = [
        awaited(actor.join.remote(seat, probe), _whose(rank))
        for rank, (actor, seat) in enumerate(zip(actors, seats, strict=True))
    ]
    await asyncio.gather(*joins)


async def _follow(rank: int, actor: Any) -> NoReturn:
    why = "it was ended"
    try:
        await awaited(actor.follow.remote(), _whose(rank))
    except ActorGoneError as error:
        why = str(error)
    raise TrainerError(
        f"{_whose(rank)} ended: {why}; start the run again to continue from the last checkpoint"
    )


async def _reserved(group: Any, wanted: Sequence[Bundle], cluster: ClusterConfig) -> None:
    total = {name: sum(bundle.get(name, 0) for bundle in wanted) for name in ("CPU", "GPU")}
    missing = [name for name, n in total.items() if n > ray.cluster_resources().get(name, 0)]
    # No node joins a cluster that this run has started.
    timeout_s = 0.0 if missing and cluster.address is None else cluster.room_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        raise ConfigError(
            f"cluster: no room for {wanted} with strategy {cluster.strategy} in {timeout_s:g} s; "
            f"{_room()}; add nodes, or lower engine.replicas, trainer.ranks or what cluster.* "
            "reserves for each"
        ) from None


def _room() -> str:
    there = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
    free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
    return f"the cluster has {there}, of which are free {free}"


@contextlib.contextmanager
def _connected(config: ProcessesConfig) -> Iterator[None]:
    """A context in which Ray is connected; an existing connection is used and kept."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    address = config.cluster.address
    try:
        _check_listens(address)
        ray.init(**_where(config))
    except RAY_DOES_NOT_START as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if address is None:
            raise ConfigError(f"cluster.backend=ray: Ray does not start here ({said})") from error
        raise ConfigError(
            f"cluster.address={address!r}: no Ray cluster answers ({said}); start one with "
            "`ray start --head`, or leave it empty for one on this machine"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has replaced it
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str | None) -> None:
    """Raises OSError if nothing listens there; Ray itself would retry for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def _where(config: ProcessesConfig) -> dict[str, Any]:
    """Arguments of `ray.init`."""
    common = {"namespace": config.cluster.namespace, "log_to_driver": False}
    if config.cluster.address is not None:
        return common | {"address": config.cluster.address}
    wanted = sum(bundle["CPU"] for bundle in bundles(config, has_gpus=False))
    if isinstance(config.relay, RelaySection):
        entries = config.relay.workers
        wanted += sum(entry.count * entry.cpus for entry in entries if not entry.command)
    cpus = max(math.ceil(wanted), len(os.sched_getaffinity(0)))
    return common | {"address": "local", "num_cpus": cpus, "include_dashboard": False}
