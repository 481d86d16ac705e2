"""Ranks of a test, as processes that begin with everything imported.

A rank that is spawned imports torch, transformers and the trainer again, which takes longer than
most of what it is to show. Here one process, which only imports, is forked for each of them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes

IMPORTED = ["trainer.policy.policy", "trainer.learning.models", "transformers.models.auto"]


def run_ranks(worker: Callable[..., None], *given: Any, ranks: int) -> None:
    """Runs `worker(rank, *given)` in each rank, and waits for their end. Raises
    torch.multiprocessing.ProcessRaisedException: a rank has failed."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    start_processes(worker, given, nprocs=ranks, start_method="forkserver")
