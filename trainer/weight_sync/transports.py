"""The transports of weights to the engines: one protocol, and one class per kind of client.

`shm`   shared memory, any device, engines on this machine (the default; this project's client)
`nccl`  broadcast over NCCL, engines on other GPUs of any machine (vLLM's client)
`gloo`  broadcast over gloo, engines on any machine, without a GPU, while they sample (vLLM's client
        for `nccl` with another process group, `gloo_trainer.py`)

Engines that none of these reach pull weights from files: `extras/relay/published_weights.py`.

`nccl` needs GPUs and was not run on any. Invariant: its operations, which NCCL itself never ends if
a member is lost, end as soon as an engine has refused an update or is found dead.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from threading import Thread
from typing import Any, ClassVar, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

import torch

from proxy.machine.port import HeldPort
from proxy.settings.late_section import load_extra
from trainer.engine import Backend
from trainer.errors import WeightSyncError
from trainer.weight_sync.address import address_towards
from trainer.weight_sync.control import HEALTH_INTERVAL_S, EngineControl, is_readable
from trainer.weight_sync.nccl_abort import abort
from trainer.weight_sync.segment import Named, SegmentWriter, Written

Shapes = Callable[[], Sequence[Named]]
T = TypeVar("T")
_REPORTS_BYTES = 1 << 16  # the size of a pipe
ANSWER_S = 30.0
"""Seconds within which the engines report why an update has failed, once the group has failed."""


LOST_S = 10.0
"""Seconds after such a failure within which an engine without some of its workers is found dead."""


class Transport(Protocol):
    """How new weights reach the engines. `stage` comes before `send` in every update."""

    def stage(self, weights: Iterable[Named], shapes: Shapes | None) -> None:
        """Prepares the weights while the engines still sample. `shapes` gives the same tensors
        without their contents; with them, a broadcast reads the weights one by one while it sends
        them, and holds one message of them. Without them it holds all."""
        ...

    def send(self) -> None:
        """Starts, executes and finishes the update of every engine with the staged weights."""
        ...

    def close(self) -> None: ...


class SharedMemoryTransport:
    """Shares one copy of the weights in memory, which every engine maps. `stage` returns when
    every engine has loaded it into memory of its own, or has refused to."""

    def __init__(self, control: EngineControl) -> None:
        """Raises WeightSyncError: an engine does not answer."""
        self._control = control
        self._workers = sum(control.world_sizes())
        self.segment = SegmentWriter()  # last, because it has a process
        self._written: Written | None = None
        self.unstaged: list[str] = []
        """Why workers have not staged the last weights: they load them while sampling is paused."""

    def stage(self, weights: Iterable[Named], shapes: Shapes | None) -> None:
        """Raises WeightSyncError: an engine has died, or has not staged the weights in time."""
        self._written = self.segment.write(weights)
        self._held(self._stage)

    def _stage(self, written: Written) -> None:
        info = asdict(written) | {"report": self.segment.report_path}
        self._control.init_weight_transfer_engine(info)
        self.unstaged = list(filter(None, self._reasons(written.digest)))

    def _held(self, step: Callable[[Written], None]) -> None:
        """Does one step of an update, again if it failed because the process that holds the memory
        had ended. Its replacement has the same memory at another path."""
        assert self._written is not None
        while True:
            self.segment.hold()
            try:
                return step(replace(self._written, path=self.segment.path))
            except WeightSyncError:
                if self.segment.held:
                    raise

    def _reasons(self, digest: str) -> list[str]:
        """What each worker reports about the weights with this digest."""
        lines, rest = list[dict[str, str]](), b""
        deadline = time.monotonic() + self._control.timeout_s
        while len(lines) < self._workers:
            if not is_readable(self.segment.reports, HEALTH_INTERVAL_S):
                self._control.check_alive()
                if time.monotonic() > deadline:
                    raise WeightSyncError(
                        f"{len(lines)} of {self._workers} workers have staged the weights within "
                        f"{self._control.timeout_s:g} s"
                    )
                continue
            if not (read := os.read(self.segment.reports, _REPORTS_BYTES)):
                self.segment.until_ended()
                raise WeightSyncError("the process that holds the weights' memory has ended")
            *whole, rest = (rest + read).split(b"\n")
            reports = map(json.loads, whole)
            lines += [each for each in reports if each["digest"] == digest]
        return [each["reason"] for each in lines]

    def send(self) -> None:
        self._held(self._send)

    def _send(self, written: Written) -> None:
        self._control.start_weight_update()
        self._control.update_weights(asdict(written))
        self._control.finish_weight_update()

    def close(self) -> None:
        self.segment.close()


class VllmTransport:
    """vLLM's own trainer-side client for `nccl` or `gloo`. With `gloo`, `stage` sends the weights;
    with `nccl`, `send` does."""

    def __init__(
        self, control: EngineControl, backend: Literal["nccl", "gloo"], device: torch.device
    ) -> None:
        """`device` holds the weights that will be sent.

        Raises:
            WeightSyncError: an engine did not join.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from trainer.weight_sync.vllm_plugin import register_backends

        register_backends()
        self._stages = backend == "gloo"
        self._source = _Source()
        self._control, self._client = control, _Client(control)
        # vLLM uses the current device, on which NCCL's communicator must be, too.
        self._on_device = partial(torch.cuda.device, device) if backend == "nccl" else nullcontext

        def joined() -> Any:
            with _trainer_init_info(control, backend) as info, self._on_device():
                return WeightTransferTrainerFactory.trainer_init(
                    info, client=self._client, source=self._source
                )

        self.engine: Any = self._client.unless_it_fails(joined)
        if backend == "nccl":
            self._client.abort = partial(abort, self.engine.model_update_group)

    def stage(self, weights: Iterable[Named], shapes: Shapes | None) -> None:
        """Raises WeightSyncError: an engine was lost. As after any other error, the transport can
        then only be closed; a new one serves the engines that are left, which still sample."""
        if shapes is not None:
            self._source.named, self._source.shapes = weights, shapes()
        else:
            self._source.named = self._source.shapes = list(weights)
        if not self._stages:
            return
        try:
            self.engine.stage_weights()
        except RuntimeError as error:  # torch's, if a member of the group is lost
            self.engine.shutdown()  # ends the waits of the members that are left
            raise self._control.lost_in_update(LOST_S) or WeightSyncError(
                "an engine stopped receiving weights; its log says why, at 'weights were not "
                f"received': {error}"
            ) from error
        except BaseException:
            self.engine.shutdown()
            raise

    def send(self) -> None:
        """Raises WeightSyncError: an engine refused the weights, or was lost. If it was lost, the
        transport can then only be closed; a new one serves the engines that are left."""
        try:
            with self._on_device():
                self.engine.send_weights()
        except RuntimeError as error:  # torch's, if a member of the group is lost
            self.engine.shutdown()  # ends the waits of the members that are left
            # Each engine reports that the group has failed: the lost one is the cause.
            lost = self._control.lost_in_update(LOST_S)
            raise (
                lost
                or self._client.failure()
                or WeightSyncError(f"an engine was lost while the weights were sent: {error}")
            ) from error

    def close(self) -> None:
        self.engine.shutdown()


def open_transport(backend: Backend, control: EngineControl, device: torch.device) -> Transport:
    """`device` holds the weights that will be sent."""
    if backend == "shm":
        return SharedMemoryTransport(control)
    return VllmTransport(control, backend, device)


class _Client:
    """The engines as vLLM's `VLLMWeightSyncClient`. It keeps the error of an update, which vLLM's
    trainer drops if the group fails as well, and ends what waits for the engine."""

    def __init__(self, control: EngineControl) -> None:
        self.abort: Callable[[], None] = lambda: None
        """Ends the operations of the group after an error of an engine."""
        self._joining: Future[Any] = Future()
        self.start_weight_update = control.start_weight_update
        self.finish_weight_update = control.finish_weight_update
        self._control = control
        self._answers: queue.SimpleQueue[WeightSyncError | None] = queue.SimpleQueue()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._control.init_weight_transfer_engine(init_info)
        except WeightSyncError as error:
            if not self._joining.done():
                self._joining.set_exception(error)
            raise

    def unless_it_fails(self, joined: Callable[[], T]) -> T:
        """The result of `joined`, which asks the engines to join a group and waits for them.

        Raises:
            WeightSyncError: an engine did not join. NCCL would wait for it for ever, so that the
                thread that waits is left alone; it ends with this process.
        """

        def join() -> None:
            try:
                result = joined()
            except BaseException as error:  # noqa: BLE001 (raised where the result is awaited)
                if not self._joining.done():
                    self._joining.set_exception(error)
            else:
                if not self._joining.done():
                    self._joining.set_result(result)

        Thread(target=join, name="join-engines", daemon=True).start()
        result: T = self._joining.result()
        return result

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        try:
            self._control.update_weights(update_info)
        except WeightSyncError as error:
            self._answers.put(error)
            self.abort()
            raise

    def failure(self) -> WeightSyncError | None:
        """Why the engines refused the update; None if they have not said so within ANSWER_S."""
        try:
            return self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            return None


class _Source:
    """The weights of an update as vLLM's `WeightSource`."""

    CONFORMS_TO: ClassVar[str] = "vllm.distributed.weight_transfer.base.WeightSource"
    """`python -m tests.conformance` compares the methods; importing it takes seconds."""

    def __init__(self) -> None:
        self.named: Iterable[Named] = ()
        self.shapes: Sequence[Named] = ()

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.shapes]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.named)


@contextmanager
def _trainer_init_info(control: EngineControl, backend: Literal["nccl", "gloo"]) -> Iterator[Any]:
    """What vLLM's client needs to join, whose port is held for it meanwhile."""
    parts = urlsplit(control.urls[0])
    address = address_towards(parts.hostname or "", parts.port or 80)
    world_size = 1 + sum(control.world_sizes())
    if backend == "gloo":
        yield load_extra("trainer.extras.gloo.trainer:GlooTrainerInit")(
            address, 0, world_size, rank=0
        )
        return
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    held = HeldPort("port", address, 0)
    try:
        yield NCCLTrainerInitInfo(address, held.port, world_size, rank=0)
    finally:
        held.close()
