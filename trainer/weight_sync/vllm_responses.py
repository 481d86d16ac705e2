"""Makes vLLM read the responses of all workers of an engine to the requests of a weight update.

Runs in vLLM's engine process, as part of the plug-in. vLLM's executor stops at the first worker
that reports an error, and leaves the responses of the workers after it in their queues. Each later
request to all workers then takes a response to an older one for its own: it reports an old error,
or success before the last worker has finished. Invariant: a request of a weight update leaves no
response behind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any

REQUESTS = frozenset(
    (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
    )
)

_log = logging.getLogger(__name__)


@cache
def install() -> None:
    """Changes vLLM's executor of several worker processes."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    MultiprocExecutor.collective_rpc = reading_all(MultiprocExecutor.collective_rpc)


def reading_all(collective_rpc: Any) -> Any:
    """`collective_rpc` of an executor, without that fault for REQUESTS.

    Raises RuntimeError with the different errors of all workers.
    """

    @wraps(collective_rpc)
    def reads_all(
        executor: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        if method not in REQUESTS:
            return collective_rpc(executor, method, timeout, args, kwargs, **options)
        sent = (method, args, kwargs or {})
        answers = collective_rpc(executor, _execute, timeout, sent, None, **options)
        if errors := sorted({answer for answer in answers if answer is not None}):
            raise RuntimeError("; ".join(errors))
        return [None] * len(answers)

    return reads_all


def _execute(
    worker: Any, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """Runs in a worker. Returns its error, which would otherwise be raised; None: it succeeded."""
    try:
        getattr(worker, method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 (any error of a worker is its answer, as in vLLM)
        _log.exception("%s failed", method)
        return f"{type(error).__name__}: {error}"
    return None
