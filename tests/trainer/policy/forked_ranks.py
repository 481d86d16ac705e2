"""Ranks of a test, as processes that begin with everything imported (`tests.forked_processes`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

from tests.forked_processes import context


def run_ranks(worker: Callable[..., None], *given: Any, ranks: int) -> None:
    """Runs `worker(rank, *given)` in each rank, and waits for their end. Raises
    torch.multiprocessing.ProcessRaisedException: a rank has failed."""
    context()
    start_processes(worker, given, nprocs=ranks, start_method="forkserver")
