"""Data-parallel ranks: who trains which micro-batch, and what is summed over all of them.

Invariant: several ranks compute what one would, to rounding. Each has the whole batch's columns,
computes its share of the micro-batches, and the gradient is the sum over ranks (FSDP2 takes the
mean, so losses are multiplied by the number of ranks). Rank 0 leads: it tells the others each call
that all of them make (`trainer.policy.learner`), over a process group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""By device; what is on the CPU (scores, calls, metrics) travels over gloo also between GPUs."""
SILENCE = timedelta(days=30)
"""How long a rank waits for the next call: agents may take their time. One that died is known at
once, by its closed connections."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A process's place among those that train together.

    Example: Seat(rank=1, size=2, rendezvous="file:///runs/a/ranks", local_rank=1)
    """

    rank: int
    size: int
    rendezvous: str
    """Where they meet: an `init_method` of torch.distributed."""
    local_rank: int
    """Which of its machine's GPUs it trains on."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; `Ranks()` is one process alone."""

    mesh: DeviceMesh | None = None
    """One dimension, over which weights are sharded and micro-batches dealt."""
    calls: dist.ProcessGroup | None = None
    """Over which rank 0 tells the others what to do."""

    @classmethod
    def join(cls, seat: Seat, device: torch.device) -> Ranks:
        """Returns when all have joined."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=seat.rendezvous,
            rank=seat.rank,
            world_size=seat.size,
        )
        return cls.of_process_group(device.type)

    @classmethod
    def of_process_group(cls, device_type: str) -> Ranks:
        """All ranks of the default process group, which is there already."""
        mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        return cls(mesh, dist.new_group(backend="gloo", timeout=SILENCE))

    def leave(self) -> None:
        """Ends the process group; what waits in it fails."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def tell(self, message: Any) -> None:
        """From rank 0 to the others, which `hear` it; nothing on these, and where it is alone."""
        if self.size > 1 and self.rank == 0:
            dist.broadcast_object_list([message], src=0, group=self.calls)

    def hear(self) -> Any:
        """What rank 0 tells next."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self.calls)
        return received[0]

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else int(self.mesh.get_local_rank())

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's part of what all have: every `size`-th item."""
        return list(items[self.rank :: self.size])

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh.get_group())
        return values

    def sum_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics that add up over micro-batches, over all ranks; every rank has the same keys."""
        names = sorted(metrics)
        total = self.sum(torch.tensor([metrics[name] for name in names], dtype=torch.float64))
        return dict(zip(names, total.tolist(), strict=True))

    def shard(
        self, root: nn.Module, blocks: Sequence[nn.Module], compute_dtype: torch.dtype
    ) -> None:
        """FSDP2 over `root`, each of its `blocks` gathered only while it computes."""
        if self.mesh is None:
            return
        low = None if compute_dtype == torch.float32 else compute_dtype
        precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=precision)
        fully_shard(root, mesh=self.mesh, mp_policy=precision)
