"""Data-parallel ranks: who trains which micro-batch, and what is summed over all of them.

Invariant: several ranks compute what one would, to rounding. Each has the whole batch's columns,
computes its share of the micro-batches, and the gradient is the sum over ranks (FSDP2 takes the
mean, so losses are multiplied by the number of ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; `Ranks()` is one process alone."""

    mesh: DeviceMesh | None = None
    """One dimension, over which weights are sharded and micro-batches dealt."""

    @classmethod
    def of_process_group(cls, device_type: str) -> Ranks:
        """All ranks of the default process group, which torchrun or Ray has set up."""
        return cls(init_device_mesh(device_type, (dist.get_world_size(),)))

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
