"""The process group over which weights reach the workers of every engine: the trainer is rank 0.

Invariants: a group belongs to no global state of torch, so that a process can join it beside the
groups that vLLM and FSDP have. A process binds to the address by which it reaches the trainer, so
no variable has to name an interface. A lost member ends the operation of all others with an error:
at once if its process has died, and after `timeout_s` if its machine cannot be reached.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypedDict

import torch
import xxhash
from torch import distributed
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from proxy.engines.segment_layout import aligned
from trainer.weight_sync.address import address_towards
from trainer.weight_sync.segment import Named, add_to_digest

Gloo: Any = distributed.ProcessGroupGloo
"""torch's type stubs do not list its operations."""
DIGEST_BYTES = 16
"""Size of an XXH3 of 128 bits."""
TIMEOUT_S = 300.0
"""Seconds of an operation; that of the largest tensor over a slow network is shorter."""
BUCKET_BYTES = 64 * 1024 * 1024
"""Size of the messages in which tensors are sent together. A larger tensor is a message alone."""
REASON_BYTES = 500
"""Size of each member's part of `GlooGroup.reasons`; longer reasons are cut."""


class Description(TypedDict):
    """The weights of an update, in the order in which they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """What a worker has received, in host memory. `digest` is that of what was sent, too."""

    tensors: list[Named]
    digest: str


class GlooGroup:
    """One process's membership. The methods are those of vLLM's NCCL communicator that weight
    transfer uses; every member calls them in the same order."""

    def __init__(
        self, store: TCPStore, address: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """`address`: this machine's, to which the others connect."""
        options = Gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [Gloo.create_device(hostname=address)]
        self.rank, self.world_size = rank, world_size
        self._store = store
        self._group: Any = Gloo(PrefixStore("weights", store), rank, world_size, options)

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, world_size: int, timeout_s: float = TIMEOUT_S
    ) -> Self:
        """A worker's membership, once all members have joined the trainer's meeting.

        Raises:
            RuntimeError: a member has not joined within `timeout_s`.
        """
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, world_size, timeout=timeout, wait_for_workers=False)
        store.set(_arrived(rank), "")
        return cls(store, address_towards(host, port), rank, world_size, timeout_s)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Sends the contiguous tensor of `src`, or fills this one.

        Raises:
            RuntimeError: a member is lost.
        """
        options = BroadcastOptions()
        options.rootRank = src
        self._open().broadcast([tensor], options).wait()

    def digests(self, own: bytes) -> list[str]:
        """The digest of every member in hexadecimal, by rank. `own` has DIGEST_BYTES bytes.

        Raises:
            RuntimeError: a member is lost.
        """
        return [each.hex() for each in self._exchange(own)]

    def reasons(self, own: str) -> list[str]:
        """Every member's reason why it has not staged the weights, by rank; empty if it has. It
        returns when every member has tried.

        Raises:
            RuntimeError: a member is lost.
        """
        padded = own.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
        found = self._exchange(padded)
        return [each.rstrip(b"\0").decode(errors="ignore") for each in found]

    def destroy(self) -> None:
        """Closes the connections, which ends the operations of the other members."""
        self._group = None

    def _exchange(self, own: bytes) -> list[bytes]:
        """The bytes of every member by rank, all of one size."""
        mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._open().allgather([found], [mine]).wait()
        return [each.numpy().tobytes() for each in found]

    def _open(self) -> Any:
        if self._group is None:
            raise RuntimeError("this process has left the group of the weight transfer")
        return self._group


class Meeting:
    """Where the workers of all engines meet the trainer, which waits for them without blocking."""

    def __init__(self, address: str, world_size: int, timeout_s: float = TIMEOUT_S) -> None:
        """Raises OSError: `address` is not one of this machine's."""
        with socket.create_server((address, 0)) as listener:
            self.port: int = listener.getsockname()[1]
            self._store: Any = TCPStore(
                address,
                self.port,
                world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self._address, self._world_size, self._timeout_s = address, world_size, timeout_s

    @property
    def is_complete(self) -> bool:
        """Whether every worker has arrived."""
        return bool(self._store.check([_arrived(rank) for rank in range(1, self._world_size)]))

    def group(self) -> GlooGroup:
        """The trainer's membership; blocks until the workers are connected to each other."""
        store, self._store = self._store, None
        return GlooGroup(store, self._address, 0, self._world_size, self._timeout_s)

    def close(self) -> None:
        """Ends the waits of workers that have arrived, unless there is a group."""
        self._store = None


def _arrived(rank: int) -> str:
    return f"arrived/{rank}"


def send(
    group: GlooGroup, weights: Iterable[Named], bucket_bytes: int = BUCKET_BYTES
) -> tuple[str, ...]:
    """The trainer's part of an update. Returns the digest of each member by rank, all equal.
    `bucket_bytes` is the same for all members.

    Raises:
        RuntimeError: a member is lost, or received something else.
    """
    total = xxhash.xxh3_128()
    bucket, used = torch.empty(bucket_bytes, dtype=torch.uint8), 0
    for name, tensor in weights:
        start = _place(used, tensor.nbytes, bucket_bytes)
        if start == 0 and used:
            group.broadcast(bucket[:used])
        if tensor.nbytes > len(bucket):
            bucket = torch.empty(tensor.nbytes, dtype=torch.uint8)
        sent = _tensor(bucket, start, tensor.dtype, tensor.shape)
        sent.copy_(tensor.detach())
        add_to_digest(total, name, sent)
        used = start + tensor.nbytes
    if used:
        group.broadcast(bucket[:used])
    digests = group.digests(total.digest())
    wrong = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if wrong:
        raise RuntimeError(f"the workers of ranks {wrong} received other weights than were sent")
    return tuple(digests)


def receive(
    group: GlooGroup, described: Description, bucket_bytes: int = BUCKET_BYTES
) -> ReceivedWeights:
    """A worker's part of an update: all tensors, in host memory. `bucket_bytes`: see `send`.

    Raises:
        RuntimeError: a member is lost.
        ValueError: this worker received other weights than were sent.
    """
    names, shapes = described["names"], described["shapes"]
    dtypes = [getattr(torch, name) for name in described["dtype_names"]]
    sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
    places, bucket_sizes = _layout(sizes, bucket_bytes)
    buckets = []
    for size in bucket_sizes:
        buckets.append(torch.empty(size, dtype=torch.uint8))
        if size:
            group.broadcast(buckets[-1])
    total, received = xxhash.xxh3_128(), []
    for name, dtype, shape, (number, start) in zip(names, dtypes, shapes, places, strict=True):
        tensor = _tensor(buckets[number], start, dtype, shape)
        add_to_digest(total, name, tensor)
        received.append((name, tensor))
    sent, *_ = group.digests(total.digest())
    if sent != total.hexdigest():
        raise ValueError(
            f"the received weights have digest {total.hexdigest()}, but the trainer sent {sent}"
        )
    return ReceivedWeights(received, sent)


def _place(used: int, size: int, bucket_bytes: int) -> int:
    """Where a tensor of `size` bytes begins in a bucket of which `used` bytes are filled; 0: it
    begins a new one."""
    start = aligned(used)
    return start if start + size <= bucket_bytes else 0


def _layout(sizes: Sequence[int], bucket_bytes: int) -> tuple[list[tuple[int, int]], list[int]]:
    """For each tensor the number of its bucket and its place there; and the size of each bucket."""
    places, buckets = [], [0]
    for size in sizes:
        start = _place(buckets[-1], size, bucket_bytes)
        if start == 0 and buckets[-1]:
            buckets.append(0)
        places.append((len(buckets) - 1, start))
        buckets[-1] = start + size
    return places, buckets


def _tensor(
    bucket: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return bucket[start : start + size].view(dtype).view(tuple(shape))
