"""What runs on the nodes of a Ray cluster: an engine, a rank of the trainer, the proxy.

Invariant: an actor's processes end with it (`proxy/engines/guard.py`), and Ray ends the actors when
the driver is gone.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from proxy.engines.vllm_server import VllmOptions
from trainer.checkpoint import Checkpoints
from trainer.cluster.lead_rank import LeadRank
from trainer.cluster.local_engine import LocalReplica, MakeServer
from trainer.config import ProxyServerConfig, TrainerConfig
from trainer.errors import TrainerError
from trainer.policy.learner import Learner, follow
from trainer.policy.parallel import Seat
from trainer.run.assembly import build_models
from trainer.run.folder import RunFolder
from trainer.run.proxy_process import ProxyProcess


class EngineActor:
    """A vLLM server on the actor's GPUs; its methods are awaited, several at a time."""

    def __init__(self, options: VllmOptions, make_server: MakeServer) -> None:
        here = replace(options, host=ray.util.get_node_ip_address())
        self._replica = LocalReplica(here, make_server)

    async def start(self) -> str:
        """Its URL, once it answers."""
        await self._replica.start()
        return self._replica.url

    async def wait(self) -> str:
        return await self._replica.wait()

    async def stop(self) -> None:
        await self._replica.stop()


class ProxyActor:
    """The recording proxy beside the engines; its store is in the run's folder."""

    def __init__(
        self,
        config: ProxyServerConfig,
        settings: dict[str, Any],
        logs: Path,
        admin_key: str,
        port: int,
    ) -> None:
        """`port`: 0: any, at its first start."""
        here = config.model_copy(update={"host": ray.util.get_node_ip_address(), "port": port})
        self._proxy = ProxyProcess(here, settings, logs, admin_key)

    async def start(self) -> str:
        """Its URL, once it answers; the same port each time."""
        await self._proxy.start()
        return self._proxy.url

    async def wait(self) -> str:
        return await self._proxy.wait()

    async def set_engines(self, engines: Sequence[dict[str, str]]) -> None:
        await self._proxy.set_engines(engines)

    async def stop(self) -> None:
        await self._proxy.stop()


class RankActor:
    """One rank of the trainer; one call at a time, each of which blocks."""

    def __init__(self, config: TrainerConfig, folder: Path) -> None:
        self._config = config
        self._folder = RunFolder(folder)
        self._learner: Learner | None = None
        self._lead: LeadRank | None = None

    def meeting(self) -> str:
        """Of rank 0: where the ranks meet."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, seat: Seat | None, probe: Sequence[int]) -> None:
        """Returns when all have joined and the models are built. None: it is alone."""
        if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._learner = build_models(self._config, seat)
        if seat is None or seat.rank == 0:
            checkpoints = Checkpoints(
                self._folder.checkpoints, keep_last=self._config.trainer.keep_last
            )
            self._lead = LeadRank(self._config, self._learner, checkpoints, probe)

    def follow(self) -> None:
        """Of every other rank: until the end."""
        if self._learner is None:
            raise TrainerError("this rank has not joined")
        follow(self._learner)

    def call(self, method: str, *args: Any) -> Any:
        """A method of rank 0's LeadRank."""
        if self._lead is None:
            raise TrainerError("this rank is not rank 0, or has not joined")
        return getattr(self._lead, method)(*args)


class ActorGoneError(TrainerError):
    """An actor, or its node, has ended, or could not be started."""

    at_fault = False
    """Whether its own constructor failed, which another one would do, too."""


async def awaited(ref: Any, whose: str) -> Any:
    """The result of an actor's method, or its own error, without Ray's wrapper.

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
