"""The ranks of the trainer: which rank trains which micro-batch, and what is summed over all ranks.

With `C = trainer.context_parallel`, groups of `C` consecutive ranks compute each micro-batch
together (`context_parallel.py`), and ranks that divide the model do so, too
(`extras/automodel/policy.py`); the groups divide the micro-batches among them.

With `trainer.weight_copies` (HSDP), each copy of the weights is sharded over its own ranks, which
gather them from each other only; gradients are averaged over the copies, too.

Invariant: several ranks compute the same as one rank, up to rounding. Rank 0 leads: it has the
whole batch, and sends each step to the other ranks over a separate process group, with the part of
the batch that the rank computes (`trainer.batch`). The gradient is the sum over ranks (FSDP2
computes the mean, so losses are multiplied by the number of ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.policy.context_parallel import ContextRanks
from trainer.policy.parallelism import Parallelism, Seat

T = TypeVar("T")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Type of device → backends of torch.distributed. Tensors on the CPU (scores, messages, metrics)
always travel over gloo."""
SILENCE = timedelta(days=30)
"""Maximum time that a rank waits for the next message; agents may take long. The end of a rank is
noticed at once, because its connections close."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together; `Ranks()` is a single process."""

    mesh: DeviceMesh | None = None
    """Mesh of one dimension, of all ranks."""
    sharding: DeviceMesh | None = None
    """Mesh over which weights are sharded, if not over all ranks: copies times shards."""
    calls: dist.ProcessGroup | None = None
    """The group over which rank 0 sends messages to the others."""
    context: ContextRanks = field(default_factory=ContextRanks)
    """The ranks with which this rank divides the tokens of each of its micro-batches."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    """Which ranks compute each micro-batch together, and how."""

    @classmethod
    def join(
        cls, seat: Seat, device: torch.device, parallelism: Parallelism | None = None
    ) -> Ranks:
        """Joins the process group. Returns when all processes have joined."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            BACKENDS[device.type],
            init_method=seat.rendezvous,
            rank=seat.rank,
            world_size=seat.size,
        )
        return cls.of_process_group(device.type, parallelism)

    @classmethod
    def of_process_group(cls, device_type: str, parallelism: Parallelism | None = None) -> Ranks:
        """All ranks of the default process group, which must already exist. Their number is a
        multiple of `parallelism.together`."""
        divided = parallelism or Parallelism()
        size = dist.get_world_size()
        mesh = init_device_mesh(device_type, (size,))
        calls = dist.new_group(backend="gloo", timeout=SILENCE)
        sharding = None
        if divided.copies > 1:
            shape = (divided.copies, size // divided.copies)
            sharding = init_device_mesh(device_type, shape, mesh_dim_names=("copy", "shard"))
        if divided.context == 1:
            return cls(mesh, sharding, calls, parallelism=divided)
        groups = init_device_mesh(
            device_type,
            (size // divided.context, divided.context),
            mesh_dim_names=("data", "context"),
        )
        own = groups["context"]
        context = ContextRanks(divided.context, own.get_local_rank(), own.get_group())
        return cls(mesh, sharding, calls, context, divided)

    def leave(self) -> None:
        """Ends the process group; pending operations of the group fail."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def tell(self, message: Any) -> None:
        """Sends a message from rank 0 to the other ranks, which receive it with `hear`. Does
        nothing on other ranks."""
        if self.rank == 0:
            self.deal([message] * self.size)

    def deal(self, messages: Sequence[Any]) -> None:
        """Sends each of the other ranks its own message from rank 0: rank `r` receives
        `messages[r]` with `hear`, and nothing of the other messages."""
        if self.size > 1:
            sent = [None, *messages[1:]]
            dist.scatter_object_list([None], sent, src=0, group=self.calls)

    def hear(self) -> Any:
        """The next message from rank 0."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None, src=0, group=self.calls)
        return received[0]

    def gather(self, value: T) -> list[T]:
        """On rank 0, the values of all ranks, by rank; empty on the others. All ranks call this
        together."""
        if self.size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=0, group=self.calls)
        return gathered or []

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        return 0 if self.mesh is None else int(self.mesh.get_local_rank())

    @property
    def groups(self) -> int:
        """Number of groups of ranks that compute their micro-batches together."""
        return self.parallelism.groups(self.size)

    def group_of(self, rank: int) -> int:
        """The group to which a rank belongs."""
        return self.parallelism.group_of(rank, self.size)

    def shares(self, items: Sequence[T]) -> list[list[T]]:
        """The items of each rank: every `size`-th item."""
        return [list(items[rank :: self.size]) for rank in range(self.size)]

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(values, group=self.mesh.get_group())
        return values

    def sum_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The sum of each metric over the groups of ranks; every rank must have the same keys, and
        the ranks of a group have the same values."""
        names = sorted(metrics)
        total = self.sum(torch.tensor([metrics[name] for name in names], dtype=torch.float64))
        total /= self.parallelism.together
        return dict(zip(names, total.tolist(), strict=True))

    def average_gradients(self, whole: nn.Module) -> None:
        """Replaces each gradient of a part that every rank keeps whole by its mean over all ranks,
        as FSDP2 does with the weights that it shards. All ranks call this together.

        A rank without a gradient of a weight (its rows have no image) counts as 0; a weight of
        which no rank has one keeps none, so that the optimizer leaves it out as on one rank.
        """
        if self.mesh is None:
            return
        weights = [each for each in whole.parameters() if each.requires_grad]
        having = self.sum(torch.tensor([float(each.grad is not None) for each in weights]))
        for weight, ranks in zip(weights, having.tolist(), strict=True):
            if not ranks:
                continue
            own = torch.zeros_like(weight) if weight.grad is None else weight.grad
            exact = own.to(torch.promote_types(own.dtype, torch.float32))
            weight.grad = (self.sum(exact) / self.size).to(weight.dtype)

    def placing(self, compute_dtype: torch.dtype) -> Callable[[nn.Module], None] | None:
        """Shards one layer with FSDP2, as `shard` does; None for a single process."""
        return None if self.mesh is None else partial(self._shard, compute_dtype=compute_dtype)

    def shard(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        compute_dtype: torch.dtype,
        whole: nn.Module | None = None,
    ) -> None:
        """Applies FSDP2 to `root`; each of its `blocks`, if it is not sharded already, is gathered
        only while it computes. `whole`: a part that each rank keeps whole; if it is trained,
        `average_gradients` completes its gradients."""
        if self.mesh is None:
            return
        for block in blocks:
            if not isinstance(block, FSDPModule):
                self._shard(block, compute_dtype=compute_dtype)
        self._shard(root, compute_dtype=compute_dtype, whole=whole)
        device = torch.device(self.mesh.device_type)
        for module in root.modules():  # buffers that were created after a layer was sharded
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, buffer.to(device), name not in module._non_persistent_buffers_set
                )

    def _shard(
        self, module: nn.Module, *, compute_dtype: torch.dtype, whole: nn.Module | None = None
    ) -> None:
        assert self.mesh is not None
        low = None if compute_dtype == torch.float32 else compute_dtype
        # Casting the inputs of each layer would copy the layout in them, and what pieces of a tree
        # keep, and hand on, in it; autocast casts what a product needs.
        precision = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        kept = None if whole is None else set(whole.to(self.mesh.device_type).parameters())
        mesh = self.sharding or self.mesh
        fully_shard(module, mesh=mesh, mp_policy=precision, ignored_params=kept)
