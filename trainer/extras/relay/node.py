"""`agentic-train relay-worker`: an engine with its relay worker, started by a run on another node.

It reads one line of standard input, a `WorkerOrder` as JSON with the relay token, which is thus in
no command line, no environment and no file there. Standard input must stay open: when it ends,
because the run has ended or was killed or the connection is lost, the worker finishes its calls for
up to `drain_s`, and ends. Invariant: the engine ends with this process, in any event.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from proxy.engines.address import EngineAddress
from proxy.engines.vllm_server import VllmServer
from proxy.errors import EngineError
from proxy.extras.relay.worker import WorkerRefused
from proxy.extras.relay.worker_process import run_worker, worker_config
from proxy.machine.secrecy import hide_memory
from trainer.cluster.local_engine import LocalReplica
from trainer.errors import ConfigError, TrainerError
from trainer.extras.relay.order import WorkerOrder
from trainer.run.control import first_to_end

WORKER_PREFIX = "AGENTIC_WORKER_"
FOLDER_PREFIX, WEIGHTS = "agentic-worker-", "weights"
logger = logging.getLogger(__name__)


def serve_from_stdin(server: type[VllmServer] = VllmServer) -> int:
    """Serves the order on standard input until SIGTERM, or until standard input ends."""
    hide_memory()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    order = _order(sys.stdin.buffer.readline())
    for name in [name for name in os.environ if name.startswith(WORKER_PREFIX)]:
        del os.environ[name]  # the order has all settings
    os.environ.update(order.env)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.run(_stopped_by_sigterm(serve(order, server)))
    return 0


def _order(line: bytes) -> WorkerOrder:
    """Raises ConfigError without the line, which contains a secret."""
    try:
        return WorkerOrder.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(
            f"standard input: expected the order of a run, but {where}: {first['msg']}; this "
            "command is started by a run with relay.workers, whose standard input must reach it "
            "(`kubectl exec -i`, `ssh` without -t)"
        ) from None


def _end_with_stdin() -> None:
    # Not `sys.stdin`, whose lock this thread would hold when the interpreter ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


async def _stopped_by_sigterm(work: Coroutine[Any, Any, None]) -> None:
    """Cancels the work at SIGTERM, which a connected worker handles itself."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


async def serve(order: WorkerOrder, server: type[VllmServer] = VllmServer) -> None:
    """Starts the engine, and serves it to the proxy until SIGTERM.

    Raises:
        EngineError, ConfigurationError: the engine could not be started.
        TrainerError: the engine ended, or the proxy refuses the worker.
    """
    with own_folder() as folder:
        await _serve_in(folder, order, server)
        shutil.rmtree(folder)  # after a failure the log stays: the message names it


@contextmanager
def own_folder() -> Iterator[Path]:
    """A new folder for a log and for weights. The weights are removed at the end of the context;
    those of workers that were killed, whose locks are free, are removed now."""
    for lock in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/lock"):
        with (
            suppress(OSError),
            lock.open(encoding="utf-8") as held,
        ):  # its worker is alive, or another user's
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent / WEIGHTS, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    with (folder / "lock").open("w", encoding="utf-8") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder / WEIGHTS, ignore_errors=True)


async def _serve_in(folder: Path, order: WorkerOrder, server: type[VllmServer]) -> None:
    log = folder / "engine.log"
    make = partial(server, order.engine, order.model, log=log, dtype=order.dtype, seed=order.seed)
    replica = LocalReplica(make)
    logger.info("%s loads %s; its engine's log on this machine: %s", order.name, order.model, log)
    try:
        await replica.start()
        await first_to_end((_failed(replica), _serve(order, replica.url, folder / WEIGHTS)))
    except WorkerRefused as error:
        raise TrainerError(str(error)) from error
    finally:
        await replica.stop()


async def _failed(replica: LocalReplica) -> None:
    raise EngineError(f"the engine ended: {await replica.wait()}")


async def _serve(order: WorkerOrder, url: str, weights: Path) -> None:
    address = EngineAddress.parse(url)
    given = {
        "proxy": order.proxy,
        "token": order.token,
        "engine": address.url,
        "engine_api_key": address.key,
        "model": order.model,
        "name": order.name,
        "drain_s": order.drain_s,
    }
    if "AGENTIC_WORKER_WEIGHTS_FOLDER" not in os.environ:
        given["weights_folder"] = weights
    await run_worker(worker_config(given))
