"""Errors of an engine's workers, with an executor whose queues and workers are in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from trainer.weight_sync.vllm_responses import reading_all


class Worker:
    def __init__(self, error: Exception | None) -> None:
        self.error, self.received = error, 0

    def update_weights(self, update_info: int) -> None:
        self.received = update_info
        if self.error is not None:
            raise self.error

    def sampled(self) -> int:
        return self.received


class Executor:
    """As vLLM's: a queue of responses for each worker, read until the first error."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = [(worker, deque[Any]()) for worker in workers]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> list[Any]:
        for worker, responses in self.workers:
            try:
                call = getattr(type(worker), method) if isinstance(method, str) else method
                responses.append(call(worker, *args, **(kwargs or {})))
            except (OSError, ValueError) as error:
                responses.append(error)
        answers = []
        for _, responses in self.workers:
            answer = responses.popleft()
            if isinstance(answer, Exception):
                raise answer
            answers.append(answer)
        return answers


call = reading_all(Executor.collective_rpc)


def test_error_of_one_worker_leaves_no_response_of_another_behind() -> None:
    failing, other = Worker(OSError("the trainer is lost")), Worker(None)
    executor = Executor(failing, other)
    with pytest.raises(RuntimeError, match="OSError: the trainer is lost"):
        call(executor, "update_weights", None, (), {"update_info": 1})
    assert not any(responses for _, responses in executor.workers)
    failing.error = None
    assert call(executor, "update_weights", None, (), {"update_info": 2}) == [None, None]
    assert call(executor, "sampled") == [2, 2]


def test_different_errors_of_workers_are_reported_together() -> None:
    errors = ("first", "second", "first")
    executor = Executor(*(Worker(ValueError(each)) for each in errors))
    with pytest.raises(RuntimeError, match=r"^ValueError: first; ValueError: second$"):
        call(executor, "update_weights", None, (), {"update_info": 1})
