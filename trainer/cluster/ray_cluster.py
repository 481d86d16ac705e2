"""A run on a Ray cluster: engines, ranks of the trainer and, if wanted, the proxy as named actors
in one placement group; the driver awaits them and holds no model.

Bundles: with `share_gpus` one for each engine and its rank, else one for each engine and one for
each rank. Invariant: what the group asks for is reserved before anything is started, or the run
ends with one line; leaving `ray_cluster` leaves no actor and no group.
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
from typing import Any, NoReturn
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from proxy.engines.vllm_server import VllmServer
from trainer.cluster.local_engine import MakeServer, engine_options
from trainer.cluster.protocol import Proxy
from trainer.cluster.ray_actors import ActorGoneError, EngineActor, ProxyActor, RankActor, awaited
from trainer.cluster.trainer import Trainer
from trainer.config import ClusterConfig, TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.policy.parallel import Seat
from trainer.run.control import RunControl, first_to_end
from trainer.run.folder import RunFolder
from trainer.run.proxy_process import ProxyProcess

Bundle = dict[str, float]
CONNECT_TIMEOUT_S = 5.0


@asynccontextmanager
async def ray_cluster(
    config: TrainerConfig,
    folder: RunFolder,
    control: RunControl,
    make_server: MakeServer = VllmServer,
) -> AsyncIterator[RayCluster]:
    """Connects, and reserves what the run needs.

    Raises:
        ConfigError: no cluster answers, or it has no room.
    """
    with _connected(config):
        wanted = bundles(config, has_gpus="GPU" in ray.cluster_resources())
        group = placement_group(wanted, strategy=config.cluster.strategy)
        try:
            await control.wait_for(_reserved(group, wanted, config.cluster))
            yield RayCluster(config, folder, control, group, wanted, make_server)
        finally:
            remove_placement_group(group)


def bundles(config: TrainerConfig, *, has_gpus: bool) -> list[Bundle]:
    """What is reserved: for engines first, then for ranks."""
    cluster, ranks = config.cluster, config.trainer.ranks
    gpus = int(has_gpus) if cluster.engine_gpus is None else cluster.engine_gpus
    if cluster.share_gpus:
        return [_bundle(cluster.engine_cpus + cluster.rank_cpus, gpus)] * ranks
    replicas = 0 if config.engine.urls else config.engine.replicas
    engines = [_bundle(cluster.engine_cpus, gpus)] * replicas
    return engines + [_bundle(cluster.rank_cpus, min(gpus, 1))] * ranks


def _bundle(cpus: float, gpus: int) -> Bundle:
    # Ray refuses a bundle of nothing.
    return {"CPU": cpus or 0.01} | ({"GPU": float(gpus)} if gpus else {})


class RayCluster:
    """Made by `ray_cluster`."""

    def __init__(
        self,
        config: TrainerConfig,
        folder: RunFolder,
        control: RunControl,
        group: Any,
        reserved: Sequence[Bundle],
        make_server: MakeServer,
    ) -> None:
        self._config = config
        self._folder = folder
        self._control = control
        self._group = group
        self._reserved = reserved
        self._make_server = make_server

    def replica(self, number: int) -> RayReplica:
        return RayReplica(self, number)

    def proxy(self, settings: dict[str, Any]) -> Proxy:
        if self._config.cluster.proxy == "driver":
            return ProxyProcess(self._config.proxy_server, settings, self._folder.logs)
        return RayProxy(self, settings, secrets.token_urlsafe(32))

    def trainer(self, probe: Sequence[int]) -> AbstractAsyncContextManager[Trainer]:
        return self._trainer(probe)

    def start_engine(self, number: int) -> Any:
        """A new actor; its server is not started yet."""
        options = engine_options(self._config, self._folder, number)
        cpus = self._config.cluster.engine_cpus
        args = options, self._make_server
        return self._actor(EngineActor, f"engine-{number}", number, cpus, *args)

    def start_proxy(self, settings: dict[str, Any], admin_key: str, port: int) -> Any:
        """A new actor; its server is not started yet."""
        config, logs = self._config.proxy_server, self._folder.logs.absolute()
        return self._actor(ProxyActor, "proxy", 0, 0.0, config, settings, logs, admin_key, port)

    async def placed(self, make: Callable[[], Any], whose: str) -> Any:
        """A new actor, once a node runs it. One that was sent to a node which Ray did not know yet
        to be lost is made again.

        Raises:
            TrainerError: the node of its bundle is gone, and no other has room for it.
            ActorGoneError: it could not be made.
        """
        timeout_s = self._config.cluster.ready_timeout_s
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
                f"(cluster.ready_timeout_s): {_room()}; `agentic-train resume` goes on from the "
                "last checkpoint"
            ) from None

    @asynccontextmanager
    async def _trainer(self, probe: Sequence[int]) -> AsyncIterator[Trainer]:
        actors = [self._start_rank(rank) for rank in range(self._config.trainer.ranks)]
        try:
            await self._control.wait_for(_join(actors, probe))
            others = asyncio.create_task(
                first_to_end(_follow(rank, actor) for rank, actor in enumerate(actors) if rank)
            )
            self._control.watch(others)
            try:
                yield Trainer(
                    lambda method, *args: awaited(actors[0].call.remote(method, *args), _whose(0)),
                    others,
                )
            finally:
                others.cancel()
                await asyncio.wait({others})
        finally:
            for actor in actors:
                ray.kill(actor)

    def _start_rank(self, rank: int) -> Any:
        shared = self._config.cluster.share_gpus
        bundle = rank if shared else len(self._reserved) - self._config.trainer.ranks + rank
        cpus, folder = self._config.cluster.rank_cpus, self._folder.path.absolute()
        return self._actor(RankActor, f"rank-{rank}", bundle, cpus, self._config, folder)

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
                f"cluster.namespace={self._config.cluster.namespace!r}: {error}; "
                "another run is there: give this one another namespace"
            ) from error


class RayReplica:
    """An engine's actor, and another one where that has ended."""

    def __init__(self, cluster: RayCluster, number: int) -> None:
        self._cluster = cluster
        self._number = number
        self._actor: Any = None
        self.url = ""

    async def start(self) -> None:
        if self._actor is None:
            make = partial(self._cluster.start_engine, self._number)
            self._actor = await self._cluster.placed(make, self._whose)
        self.url = await awaited(self._actor.start.remote(), self._whose)

    async def wait(self) -> str:
        try:
            how: str = await awaited(self._actor.wait.remote(), self._whose)
            return how
        except ActorGoneError as error:
            ray.kill(self._actor)  # it may only be out of reach; and its name is free then
            self._actor = None
            return str(error)

    async def stop(self) -> None:
        await _stop(self._actor, self._whose)

    @property
    def _whose(self) -> str:
        return f"the actor of engine-{self._number}"


class RayProxy:
    """The proxy's actor, and another one, at the same address, where that has ended."""

    def __init__(self, cluster: RayCluster, settings: dict[str, Any], admin_key: str) -> None:
        self._cluster = cluster
        self._settings = settings
        self._port = 0
        self._actor: Any = None
        self.admin_key = admin_key
        self.url = ""

    async def start(self) -> None:
        """Raises TrainerError where it could not be placed on the same node again."""
        if self._actor is None:
            settings = self._settings, self.admin_key, self._port
            make = partial(self._cluster.start_proxy, *settings)
            self._actor = await self._cluster.placed(make, "the proxy's actor")
        url = await awaited(self._actor.start.remote(), "the proxy's actor")
        if self.url not in ("", url):
            raise TrainerError(f"the proxy was at {self.url} and is at {url}: its node is gone")
        self.url, self._port = url, urlsplit(url).port or 0

    async def wait(self) -> str:
        try:
            how: str = await awaited(self._actor.wait.remote(), "the proxy's actor")
            return how
        except ActorGoneError as error:
            ray.kill(self._actor)  # it may only be out of reach; and its name is free then
            self._actor = None
            return str(error)

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        self._settings = self._settings | {"engines": list(engines)}
        if self._actor is not None:
            await awaited(self._actor.set_engines.remote(engines), "the proxy's actor")

    async def stop(self) -> None:
        await _stop(self._actor, "the proxy's actor")


async def _stop(actor: Any, whose: str) -> None:
    if actor is not None:
        with contextlib.suppress(ActorGoneError):
            await awaited(actor.stop.remote(), whose)
        ray.kill(actor)


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
    why = "it was told to end"
    try:
        await awaited(actor.follow.remote(), _whose(rank))
    except ActorGoneError as error:
        why = str(error)
    raise TrainerError(
        f"{_whose(rank)} ended: {why}; `agentic-train resume` goes on from the last checkpoint"
    )


async def _reserved(group: Any, wanted: Sequence[Bundle], cluster: ClusterConfig) -> None:
    total = {name: sum(bundle.get(name, 0) for bundle in wanted) for name in ("CPU", "GPU")}
    missing = [name for name, n in total.items() if n > ray.cluster_resources().get(name, 0)]
    # No node joins a cluster of our own.
    timeout_s = 0.0 if missing and cluster.address is None else cluster.ready_timeout_s
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
def _connected(config: TrainerConfig) -> Iterator[None]:
    """Within it Ray is connected; a driver that is already stays so."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    address = config.cluster.address
    try:
        _check_listens(address)
        ray.init(**_where(config))
    except Exception as error:  # Ray raises what it likes, a bare Exception too
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if address is None:
            raise ConfigError(f"cluster.backend=ray: Ray does not start here ({said})") from error
        raise ConfigError(
            f"cluster.address={address!r}: no Ray cluster answers ({said}); start one with "
            "`ray start --head`, or leave it empty for one on this machine"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own there
    try:
        yield
    finally:
        ray.shutdown()


def _check_listens(address: str | None) -> None:
    """Ray itself would try for minutes. Raises OSError."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def _where(config: TrainerConfig) -> dict[str, Any]:
    """Arguments of `ray.init`."""
    common = {"namespace": config.cluster.namespace, "log_to_driver": False}
    if config.cluster.address is not None:
        return common | {"address": config.cluster.address}
    wanted = sum(bundle["CPU"] for bundle in bundles(config, has_gpus=False))
    cpus = max(math.ceil(wanted), len(os.sched_getaffinity(0)))
    return common | {"address": "local", "num_cpus": cpus, "include_dashboard": False}
