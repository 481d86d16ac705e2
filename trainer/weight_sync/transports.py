"""The transports of weights to the engines: one protocol, and one class per kind of client.

`shm`   shared memory, any device, engines on this machine (the default; this project's client)
`ipc`   CUDA IPC handles, engines on this machine's GPUs (vLLM's client)
`nccl`  broadcast over NCCL, engines on any machine (vLLM's client)

`ipc` and `nccl` follow vLLM's documented trainer-side API. They need a GPU and are not tested.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import torch

from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.segment import Named, SegmentWriter, Written

Backend = Literal["shm", "ipc", "nccl"]


class Transport(Protocol):
    """How new weights reach the engines. `stage` comes before `send` in every update."""

    def stage(self, weights: Iterable[Named]) -> None:
        """Prepares the weights while the engines still sample."""
        ...

    def send(self) -> None:
        """Starts, executes and finishes the update of every engine with the staged weights."""
        ...

    def close(self) -> None: ...


class SharedMemoryTransport:
    """Shares one copy of the weights in memory, which every engine maps."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self.segment = SegmentWriter()
        self._written: Written | None = None
        control.init_weight_transfer_engine({})

    def stage(self, weights: Iterable[Named]) -> None:
        self._written = self.segment.write(weights)

    def send(self) -> None:
        assert self._written is not None
        self._control.start_weight_update()
        self._control.update_weights(asdict(self._written))
        self._control.finish_weight_update()

    def close(self) -> None:
        self.segment.close()


class VllmTransport:
    """vLLM's own trainer-side client for `ipc` or `nccl`."""

    def __init__(self, control: EngineControl, backend: Literal["ipc", "nccl"]) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        self._source = _Source()
        self._engine: Any = WeightTransferTrainerFactory.trainer_init(
            _trainer_init_info(control, backend), client=control, source=self._source
        )

    def stage(self, weights: Iterable[Named]) -> None:
        self._source.named = list(weights)

    def send(self) -> None:
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


def address_towards(url: str) -> str:
    """The address at which the host of the URL can reach this machine."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        probe.connect((parts.hostname or "", parts.port or 80))
        return str(probe.getsockname()[0])


def open_transport(backend: Backend, control: EngineControl) -> Transport:
    if backend == "shm":
        return SharedMemoryTransport(control)
    return VllmTransport(control, backend)


class _Source:
    """Gathered weights as vLLM's `WeightSource`."""

    def __init__(self) -> None:
        self.named: list[Named] = []

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.named]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.named)


def _trainer_init_info(control: EngineControl, backend: Literal["ipc", "nccl"]) -> Any:
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address = address_towards(control.urls[0])
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        rank=0,
        master_address=address,
        master_port=port,
        world_size=1 + sum(control.world_sizes()),
    )
