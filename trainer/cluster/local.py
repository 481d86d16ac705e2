"""The trainer's ranks on this machine: rank 0 in this process, each other one in its own.

Invariant: no rank outlives rank 0, however it ends (`proxy/engines/guard.py`), and a rank that ends
ends the run, with its last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch

from proxy.engines import guard
from trainer.checkpoint import Checkpoints
from trainer.cluster.lead_rank import LeadRank
from trainer.cluster.local_engine import LocalReplica, engine_options
from trainer.cluster.trainer import Trainer
from trainer.config import TrainerConfig
from trainer.errors import ConfigError, TrainerError
from trainer.policy.learner import Learner
from trainer.policy.parallel import Seat
from trainer.run.assembly import build_models
from trainer.run.control import RunControl, first_to_end
from trainer.run.folder import RunFolder
from trainer.run.proxy_process import ProxyProcess

STOP_GRACE_S = 2.0
"""A rank has nothing to save."""
LOG_TAIL_BYTES = 2000
INTERFACE = "GLOO_SOCKET_IFNAME"


@asynccontextmanager
async def local_trainer(
    config: TrainerConfig, folder: RunFolder, control: RunControl, probe: Sequence[int]
) -> AsyncIterator[Trainer]:
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
        learner = await control.wait_for(asyncio.to_thread(_build, config, seat, others))
        stack.callback(learner.policy.ranks.leave)
        checkpoints = Checkpoints(folder.checkpoints, keep_last=config.trainer.keep_last)
        lead = LeadRank(config, learner, checkpoints, probe)
        stack.push_async_callback(asyncio.to_thread, lead.close)
        if others is not None:  # first: what waits for them, fails
            stack.push_async_callback(others.stop)

        async def call(method: str, *args: Any) -> Any:
            return await asyncio.to_thread(getattr(lead, method), *args)

        yield Trainer(call, others.ended if others is not None else None)
        await asyncio.to_thread(learner.policy.ranks.tell, None)


class LocalCluster:
    """Example: LocalCluster(config, folder, control).replica(0)"""

    def __init__(self, config: TrainerConfig, folder: RunFolder, control: RunControl) -> None:
        self._config = config
        self._folder = folder
        self._control = control

    def replica(self, number: int) -> LocalReplica:
        return LocalReplica(engine_options(self._config, self._folder, number))

    def proxy(self, settings: dict[str, Any]) -> ProxyProcess:
        return ProxyProcess(self._config.proxy_server, settings, self._folder.logs)

    def trainer(self, probe: Sequence[int]) -> AbstractAsyncContextManager[Trainer]:
        return local_trainer(self._config, self._folder, self._control, probe)


def torchrun_seat(environment: Mapping[str, str]) -> Seat | None:
    """Where torchrun (or what sets the same variables) has started us; None: it has not."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, size, local_rank = (
        int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    return Seat(rank, size, "env://", local_rank) if size > 1 else None


def check_seat(config: TrainerConfig, seat: Seat) -> None:
    """
    Raises:
        ConfigError: torchrun has started another number of ranks than is configured.
    """
    if config.trainer.ranks != seat.size:
        raise ConfigError(
            f"trainer.ranks={config.trainer.ranks}: torchrun has started {seat.size}; "
            "give both the same number"
        )


def _build(config: TrainerConfig, seat: Seat | None, others: _OtherRanks | None) -> Learner:
    if others is None:
        return build_models(config, seat)
    torch.set_num_threads(max(1, torch.get_num_threads() // config.trainer.ranks))
    with _on_loopback():
        return build_models(config, seat)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """What is built within it listens on loopback only."""
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[INTERFACE]
        if before is not None:
            os.environ[INTERFACE] = before


class _OtherRanks:
    """All ranks but 0: `python -m trainer.cluster.follower`."""

    def __init__(self, config: TrainerConfig, folder: RunFolder) -> None:
        size, meeting = config.trainer.ranks, (folder.path / ".ranks").absolute()
        meeting.unlink(missing_ok=True)
        self.seats = [Seat(rank, size, f"file://{meeting}", rank) for rank in range(size)]
        self._folder = folder
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self.ended: asyncio.Task[None]
        """Ends with a TrainerError when a rank has ended."""

    async def start(self) -> None:
        """Returns when each is about to join."""
        for seat in self.seats[1:]:
            self._processes[seat.rank] = await self._start(seat)
        self.ended = asyncio.create_task(self._first_end())
        joining = asyncio.create_task(self._join())
        await asyncio.wait({joining, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            joining.cancel()
            self.ended.result()

    async def stop(self) -> None:
        """Returns when they are gone."""
        if hasattr(self, "ended"):
            self.ended.cancel()
            await asyncio.wait({self.ended})
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            await process.wait()

    async def _start(self, seat: Seat) -> asyncio.subprocess.Process:
        with self._log(seat.rank).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(STOP_GRACE_S)),
                *(sys.executable, "-m", "trainer.cluster.follower"),
                *(str(self._folder.config), json.dumps(asdict(seat))),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=os.environ | {INTERFACE: "lo"},
                start_new_session=True,  # a Ctrl-C is rank 0's to act on
            )

    async def _join(self) -> None:
        for process in self._processes.values():
            assert process.stdout is not None
            if not await process.stdout.readline():
                await asyncio.Event().wait()  # it is ending, and `ended` will say why

    async def _first_end(self) -> None:
        await first_to_end(self._end_of(rank) for rank in self._processes)

    async def _end_of(self, rank: int) -> NoReturn:
        code = await self._processes[rank].wait()
        raise TrainerError(
            f"rank {rank} of the trainer ended with code {code}: {self._last_words(rank)} (log: "
            f"{self._log(rank)}); `agentic-train resume` goes on from the last checkpoint"
        )

    def _log(self, rank: int) -> Path:
        return self._folder.logs / f"rank-{rank}.log"

    def _last_words(self, rank: int) -> str:
        text = self._log(rank).read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"
