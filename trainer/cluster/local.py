"""The trainer's ranks on this machine: rank 0 in this process, each other rank in its own process.

Invariant: no rank outlives rank 0, even if rank 0 is killed (`proxy/engines/guard.py`). If a rank
ends, the run ends with an error that contains the last line of the rank's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import torch

from agent_loop.processes.listening import ListeningPorts
from proxy.engines import guard
from proxy.engines.vllm_server import socket_folder
from proxy.machine.secrecy import inherited, pipe_with
from proxy.settings.late_section import load_extra
from trainer.cluster.cluster import WorkerProcess
from trainer.cluster.config import ProcessesConfig
from trainer.cluster.device_plan import gpus_here, plan_devices
from trainer.cluster.local_engine import LocalReplica
from trainer.cluster.proxy_server import ProxyProcess
from trainer.cluster.rank_models import models_of_rank
from trainer.cluster.rank_zero import OneThread, RankZero
from trainer.cluster.ranks import (
    check_seat,
    rendezvous_ports,
    starts_engines_early,
    torchrun_seat,
)
from trainer.cluster.replica_server import replica_server
from trainer.errors import TrainerError
from trainer.learning.learner import Learner
from trainer.learning.models import Models
from trainer.learning.policies import Learners
from trainer.policy.parallelism import Seat
from trainer.ranks_config import RanksConfig
from trainer.run.control import RunControl, first_to_end
from trainer.run.folder import RunFolder

T = TypeVar("T")

STOP_GRACE_S = 2.0
"""Seconds that a rank may take to end; short, because it has nothing to save."""
LOG_TAIL_BYTES = 2000
INTERFACE = "GLOO_SOCKET_IFNAME"


@asynccontextmanager
async def local_trainer(
    config: ProcessesConfig, folder: RunFolder, control: RunControl, probe: Sequence[int]
) -> AsyncIterator[RankZero]:
    """Starts the ranks and builds the models.

    Raises:
        ConfigError: a path is not a checkpoint of a causal model.
        TrainerError: a rank ended.
    """
    seat = torchrun_seat(os.environ)
    others = None
    async with AsyncExitStack() as stack:
        if seat is not None:
            check_seat(config, seat)
        elif config.trainer.ranks > 1:
            others = _OtherRanks(config, folder)
            seat = others.seats[0]
            stack.push_async_callback(others.stop)
            await control.wait_for(others.start())
            control.watch(others.ended)
        models = await control.wait_for(asyncio.to_thread(_build, config, seat, others))
        stack.callback(models.policy.ranks.leave)
        learners = await control.wait_for(asyncio.to_thread(_learners, config, models, probe))
        thread = stack.enter_context(OneThread(learners))
        if others is not None:  # ended first, so that operations that wait for them fail
            stack.push_async_callback(others.stop)
        yield RankZero(thread.send, others.ended if others is not None else None)
        await asyncio.to_thread(models.finish)


class LocalCluster:
    """Example: LocalCluster(config, folder, control).replica(0)"""

    def __init__(
        self,
        config: ProcessesConfig,
        folder: RunFolder,
        control: RunControl,
        *,
        trains: bool = True,
    ) -> None:
        """`trains`: whether it has ranks; otherwise the engines have all GPUs."""
        self._config = config
        self._folder = folder
        self._control = control
        self.plan = plan_devices(config, gpus_here(), trains=trains)
        self._listening = ListeningPorts([os.getpid()])

    @property
    def private_paths(self) -> list[Path]:
        return [socket_folder()]

    @property
    def starts_engines_early(self) -> bool:
        return starts_engines_early(self._config.trainer)

    def private_ports(self) -> frozenset[int]:
        engines = {urlsplit(url).port or 80 for url in self._config.engine.urls}
        return self._listening.now() | engines | rendezvous_ports(os.environ)

    def replica(self, number: int) -> LocalReplica:
        make = replica_server(self._config, self._folder, number, plan=self.plan)
        return LocalReplica(make)

    def relay_worker(self, entry: Any, order: Any, log: Path) -> WorkerProcess:
        worker: WorkerProcess = load_extra("trainer.extras.relay.worker_process:on_this_machine")(
            order, log
        )
        return worker

    def proxy(self, settings: dict[str, Any]) -> ProxyProcess:
        return ProxyProcess(self._config.proxy_server, settings, self._folder.logs)

    def trainer(self, probe: Sequence[int]) -> AbstractAsyncContextManager[RankZero]:
        return local_trainer(self._config, self._folder, self._control, probe)


def _build(config: ProcessesConfig, seat: Seat | None, others: _OtherRanks | None) -> Models:
    """The models of the only policy, or of the first of `trainer.policies`."""
    if policies := config.trainer.policies:
        return models_of_rank(config.of_policy(next(iter(policies))))
    if others is None:
        return models_of_rank(config, seat)
    torch.set_num_threads(max(1, torch.get_num_threads() // config.trainer.ranks))
    with _on_loopback():
        return models_of_rank(config, seat)


def _learners(config: ProcessesConfig, first: Models, probe: Sequence[int]) -> Learners:
    """The learners of all policies, of which the first has these models."""
    policies = config.trainer.policies
    if not policies:
        return Learners.of(Learner(config, first, probe))
    learners: dict[str, Learner] = {}
    for name in policies:
        own = config.of_policy(name)
        models = models_of_rank(own, weights_of=first) if learners else first
        learners[name] = Learner(own, models, probe)
    return Learners(learners, frozenset(policies) - set(config.trained_policies))


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """A context in which new process groups listen on loopback only."""
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[INTERFACE]
        if before is not None:
            os.environ[INTERFACE] = before


class _OtherRanks:
    """The processes of all ranks except 0: `python -m trainer.cluster.follower`."""

    def __init__(self, config: ProcessesConfig, folder: RunFolder) -> None:
        size, meeting = config.trainer.ranks, (folder.path / ".ranks").absolute()
        meeting.unlink(missing_ok=True)
        self.seats = [Seat(rank, size, f"file://{meeting}", rank) for rank in range(size)]
        self._folder = folder
        self._sections = config.model_dump_json(include=set(RanksConfig.model_fields))
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self.ended: asyncio.Task[None]
        """A task that raises a TrainerError when a rank has ended."""

    async def start(self) -> None:
        """Starts the processes, and returns when all are ready to join."""
        for seat in self.seats[1:]:
            self._processes[seat.rank] = await self._start(seat)
        self.ended = asyncio.create_task(self._first_end())
        joining = asyncio.create_task(self._join())
        await asyncio.wait({joining, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            joining.cancel()
            self.ended.result()

    async def stop(self) -> None:
        """Ends the processes, and returns when they have ended."""
        if hasattr(self, "ended"):
            self.ended.cancel()
            await asyncio.wait({self.ended})
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            await process.wait()

    async def _start(self, seat: Seat) -> asyncio.subprocess.Process:
        # A pipe, because engine.env may hold secrets.
        with self._log(seat.rank).open("ab") as log, pipe_with(self._sections) as sections_fd:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *(sys.executable, "-m", "trainer.cluster.follower"),
                *(f"/dev/fd/{sections_fd}", json.dumps(asdict(seat))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=inherited() | {INTERFACE: "lo"},
                pass_fds=(sections_fd,),
                start_new_session=True,  # only rank 0 handles Ctrl-C
            )

    async def _join(self) -> None:
        for process in self._processes.values():
            assert process.stdout is not None
            if not await process.stdout.readline():
                await asyncio.Event().wait()  # it is ending, and `ended` raises why

    async def _first_end(self) -> None:
        await first_to_end(self._end_of(rank) for rank in self._processes)

    async def _end_of(self, rank: int) -> NoReturn:
        code = await self._processes[rank].wait()
        raise TrainerError(
            f"rank {rank} of the trainer ended with code {code}: {self._last_words(rank)} (log: "
            f"{self._log(rank)}); start the run again to continue from the last checkpoint"
        )

    def _log(self, rank: int) -> Path:
        return self._folder.logs / f"rank-{rank}.log"

    def _last_words(self, rank: int) -> str:
        text = self._log(rank).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "without output"
