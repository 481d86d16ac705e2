"""The actors on the nodes of a Ray cluster: an engine, a rank of the trainer, and the proxy.

Invariant: the processes of an actor end with the actor (`proxy/engines/guard.py`), and Ray ends the
actors when the driver has ended.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from proxy.engines.vllm_nodes import ServerPart
from proxy.machine.port import HeldPort, host_and_port
from trainer.cluster.local_engine import LocalReplica, MakeServer
from trainer.cluster.proxy_server import ProxyProcess, ProxyServerConfig
from trainer.cluster.rank_models import models_of_rank
from trainer.cluster.rank_zero import RankRequest
from trainer.errors import TrainerError
from trainer.extras.relay.order import WorkerOrder
from trainer.extras.relay.worker_process import WorkerCommand
from trainer.learning.learner import Learner
from trainer.learning.models import Models, follow
from trainer.learning.policies import Learners
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig

T = TypeVar("T")


class EngineActor:
    """A vLLM server, or a node's part of it, on the actor's GPUs. Its methods may run at the same
    time."""

    def __init__(self, make_server: MakeServer) -> None:
        self._make_server = partial(make_server, host=ray.util.get_node_ip_address())
        self._replica = LocalReplica(self._make_server)
        self._meeting: HeldPort | None = None

    async def meeting(self) -> str:
        """On the first node of an engine: the address at which its workers meet."""
        self._meeting, address = _held_address()
        return address

    async def start(self, part: ServerPart | None = None) -> str:
        """Starts the server, and returns its URL when it answers; a part that does not answer, at
        once."""
        self._replica = LocalReplica(partial(self._make_server, part=part))
        await self._replica.start()
        return self._replica.url

    async def wait(self) -> str:
        return await self._replica.wait()

    async def stop(self) -> None:
        await self._replica.stop()


class ProxyActor:
    """The recording proxy on a node of the cluster; its store is in the run's folder."""

    def __init__(
        self,
        config: ProxyServerConfig,
        settings: dict[str, Any],
        logs: Path,
        admin_key: str,
        port: int,
    ) -> None:
        """With `port` 0, the proxy takes any free port at its first start."""
        here = config.model_copy(update={"host": ray.util.get_node_ip_address(), "port": port})
        self._proxy = ProxyProcess(here, settings, logs, admin_key)

    async def start(self) -> str:
        """Starts the proxy, and returns its URL when it answers. The port is the same at each
        start."""
        await self._proxy.start()
        return self._proxy.url

    async def wait(self) -> str:
        return await self._proxy.wait()

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        await self._proxy.set_engines(engines)

    async def stop(self) -> None:
        await self._proxy.stop()


class RelayActor:
    """A relay worker with its engine on the actor's GPUs."""

    def __init__(self, argv: Sequence[str], order: WorkerOrder, log: Path) -> None:
        self._worker = WorkerCommand(argv, order, log)

    async def start(self) -> None:
        await self._worker.start()

    async def wait(self) -> str:
        return await self._worker.wait()

    async def stop(self) -> None:
        await self._worker.stop()


class RankActor:
    """One rank of the trainer. Calls block, and are served one at a time."""

    def __init__(self, config: RanksConfig) -> None:
        self._config = config
        self._meeting: HeldPort | None = None
        self._models: Models | None = None
        self._learners: Learners | None = None

    def meeting(self) -> str:
        """On rank 0: the address at which the ranks meet."""
        self._meeting, address = _held_address()
        return f"tcp://{address}"

    def join(self, seat: Seat | None, probe: Sequence[int]) -> None:
        """Returns when all ranks have joined and the models are built. Without a `seat` the rank
        trains alone."""
        if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._models = models_of_rank(self._config, seat)
        if seat is None or seat.rank == 0:
            self._learners = Learners.of(Learner(self._config, self._models, probe))

    def follow(self) -> None:
        """On every other rank: executes the steps that rank 0 sends, until the end."""
        if self._models is None:
            raise TrainerError("this rank has not joined the others; call `join` before `follow`")
        follow(self._models)

    def ask(self, request: RankRequest[T]) -> T:
        """On rank 0: the result of the request."""
        if self._learners is None:
            raise TrainerError("only rank 0 answers requests, after `join`; ask rank 0")
        return request.on(self._learners)


def _held_address() -> tuple[HeldPort, str]:
    """The actor's node and a TCP port that no other process is given there, for as long as the
    actor lives: HOST:PORT, or [HOST]:PORT."""
    host = ray.util.get_node_ip_address()
    held = HeldPort("port", host, 0)
    return held, host_and_port(host, held.port)


class ActorGoneError(TrainerError):
    """An actor, or its node, has ended, or could not be started."""

    at_fault = False
    """Whether the actor's own constructor failed; it would fail again in another actor."""


async def awaited(ref: Any, whose: str) -> Any:
    """The result of an actor's method. Its own errors are raised without Ray's wrapper.

    Raises:
        ActorGoneError: `whose` actor has ended, or did not start.
    """
    try:
        return await ref
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        gone = ActorGoneError(f"{whose} is gone: {' '.join(str(error).split())[:300]}")
        gone.at_fault = getattr(error, "actor_init_failed", False)
        raise gone from error


async def started(actor: Any, place: Callable[[], Awaitable[Any]], whose: str) -> tuple[Any, str]:
    """Starts the server of an actor, and returns the actor and the server's URL. `place` makes
    another actor if there is none, or if it has ended: the server of a node that is lost can end
    before the actor does.

    Raises:
        ActorGoneError: the other actor ended before its server had started.
    """
    if actor is not None:
        with contextlib.suppress(ActorGoneError):
            return actor, await awaited(actor.start.remote(), whose)
        ray.kill(actor)  # it may still run, out of reach; this frees its name
    actor = await place()
    return actor, await awaited(actor.start.remote(), whose)


async def until_end(actor: Any, whose: str) -> tuple[str, Any]:
    """How the actor's server ended; and the actor, if it still runs."""
    try:
        return await awaited(actor.wait.remote(), whose), actor
    except ActorGoneError as error:
        ray.kill(actor)  # it may still run, out of reach; this frees its name
        return str(error), None


async def end(actor: Any, whose: str) -> None:
    """Stops the actor's server, and ends the actor."""
    if actor is not None:
        with contextlib.suppress(ActorGoneError):
            await awaited(actor.stop.remote(), whose)
        ray.kill(actor)
