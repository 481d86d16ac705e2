"""Errors of an engine's workers, with vLLM's own executor and queues that are in this process."""

from __future__ import annotations

import warnings
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # vLLM uses torch.jit
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from trainer.weight_sync.vllm_responses import reading_all


class Worker:
    """What a worker process executes, and the queue of its responses."""

    def __init__(self, rank: int) -> None:
        self.rank, self.worker = rank, self
        self.error: Exception | None = None
        self.received = 0
        self.responses = deque[Any]()

    def update_weights(self, update_info: int) -> None:
        self.received = update_info
        if self.error is not None:
            raise self.error

    def sampled(self) -> int:
        return self.received

    def handle_output(self, output: Any) -> None:
        status = WorkerProc.ResponseStatus
        if isinstance(output, Exception):
            self.responses.append((status.FAILURE, str(output)))
        else:
            self.responses.append((status.SUCCESS, output))

    def dequeue(self, timeout: float | None = None) -> Any:
        return self.responses.popleft()


class Executor(SimpleNamespace):
    """What vLLM's executor uses of itself."""

    def __init__(self, count: int) -> None:
        self.response_mqs = [Worker(rank) for rank in range(count)]
        self.rpc_broadcast_mq = self
        self.futures_queue = deque[Any]()
        self.is_failed = False

    def enqueue(self, request: Any) -> None:
        for worker in self.response_mqs:
            WorkerProc._execute_worker_rpc(worker, request)


call = reading_all(MultiprocExecutor.collective_rpc)


def test_error_of_one_worker_leaves_no_response_of_another_behind() -> None:
    executor = Executor(2)
    first, _ = executor.response_mqs
    first.error = OSError("the trainer is lost")
    with pytest.raises(RuntimeError, match="OSError: the trainer is lost"):
        call(executor, "update_weights", None, (), {"update_info": 1})
    assert not any(worker.responses for worker in executor.response_mqs)
    first.error = None
    assert call(executor, "update_weights", kwargs={"update_info": 2}) == [None, None]
    assert call(executor, "sampled") == [2, 2]


def test_different_errors_of_workers_are_reported_together() -> None:
    executor = Executor(3)
    for worker, error in zip(executor.response_mqs, ("first", "second", "first"), strict=True):
        worker.error = ValueError(error)
    with pytest.raises(RuntimeError, match=r"^ValueError: first; ValueError: second$"):
        call(executor, "update_weights", None, (), {"update_info": 1})


def test_vllm_itself_leaves_a_response_behind() -> None:
    """If this fails, vLLM reads all responses, and the module is superfluous."""
    executor = Executor(2)
    executor.response_mqs[0].error = OSError("the trainer is lost")
    with pytest.raises(RuntimeError, match="the trainer is lost"):
        MultiprocExecutor.collective_rpc(executor, "update_weights", kwargs={"update_info": 1})
    assert [len(worker.responses) for worker in executor.response_mqs] == [0, 1]
