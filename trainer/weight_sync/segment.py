"""Tensors in one piece of shared memory that has no name and cannot outlive the trainer.

The memory is a Linux memfd. A reader on the same machine opens it as `/proc/PID/fd/FD`, so nothing
is written to disk, nothing has to be unlinked, and a killed trainer leaks nothing.

Layout: 8 bytes little-endian header length, the header (JSON: one `{name, dtype, shape, offset}`
per tensor), then each tensor at its 64-byte-aligned offset.

Invariant: `digest` covers every byte of every tensor in its place, its name, dtype and shape; a
reader that computes the same digest holds exactly what was written.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

ALIGN_BYTES = 64  # a cache line; also enough for any dtype's own alignment
_LENGTH_BYTES = 8
_PIECE_BYTES = 1 << 18  # what was copied is hashed while it is still in the core's own cache

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """What a reader needs to know of one write."""

    path: str
    size_bytes: int
    digest: str


class SegmentWriter:
    """One writer's segment; it grows to what is written and is reused from write to write."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("agentic-rl-weights")
        self._size_bytes = 0
        self._map: mmap.mmap | None = None

    def write(self, tensors: Iterable[Named]) -> Written:
        """Copies the tensors in (from any device). Readers must not read meanwhile."""
        named = [(name, tensor.detach()) for name, tensor in tensors]
        header, offsets, end = _layout(named)
        view = self._reserve(end)
        view[:_LENGTH_BYTES] = len(header).to_bytes(_LENGTH_BYTES, "little")
        view[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = header
        total = xxhash.xxh3_128()
        for (name, tensor), offset in zip(named, offsets, strict=True):
            target = _view(view, tensor.dtype, tensor.shape, offset)
            total.update(_title(name, target))
            for piece in _copied(tensor, target):
                total.update(_bytes(piece))
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Written(path, end, total.hexdigest())

    def close(self) -> None:
        self._map = None
        os.close(self._fd)

    def _reserve(self, size_bytes: int) -> mmap.mmap:
        if self._map is None or size_bytes > self._size_bytes:
            os.ftruncate(self._fd, size_bytes)
            self._map = mmap.mmap(self._fd, size_bytes)
            self._size_bytes = size_bytes
        return self._map


def open_segment(path: str, size_bytes: int) -> mmap.mmap:
    """Maps a segment that another process has written.

    Raises:
        FileNotFoundError: its writer is gone, or runs on another machine or in another container.
    """
    fd = os.open(Path(path), os.O_RDWR)
    try:
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


def read(view: mmap.mmap) -> list[Named]:
    """The tensors as views of the shared memory, in the order in which they were written."""
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    header = json.loads(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    return [
        (
            entry["name"],
            _view(view, getattr(torch, entry["dtype"]), entry["shape"], entry["offset"]),
        )
        for entry in header
    ]


def digest(tensors: Iterable[Named]) -> str:
    """XXH3 (128 bit) over each tensor's name, dtype, shape and bytes, in order.

    Against faults, not against an attacker: it runs at the speed of reading memory, where a
    cryptographic hash would cost several times the copy.
    """
    total = xxhash.xxh3_128()
    for name, tensor in tensors:
        total.update(_title(name, tensor))
        total.update(_bytes(tensor.reshape(-1)))
    return total.hexdigest()


def _title(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode()


def _bytes(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _copied(source: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies, and yields the flat target piece by piece as it is filled."""
    if source.device.type != "cpu" or not source.is_contiguous():
        target.copy_(source)
        yield target.view(-1)
        return
    new, old = source.view(-1), target.view(-1)
    size = _PIECE_BYTES // target.element_size()
    for start in range(0, len(new), size):
        yield old[start : start + size].copy_(new[start : start + size])


def _layout(named: list[Named]) -> tuple[bytes, list[int], int]:
    """The header, each tensor's offset, and the segment's size."""
    # The header's length depends on the offsets' digits: offsets count from behind it.
    sizes = [tensor.numel() * tensor.element_size() for _, tensor in named]
    relative = [0]
    for size in sizes:
        relative.append(_aligned(relative[-1] + size))
    room = _aligned(_LENGTH_BYTES + len(_header(named, [1 << 62] * len(named))))
    offsets = [room + start for start in relative[:-1]]
    return _header(named, offsets), offsets, max(room + relative[-1], 1)


def _header(named: list[Named], offsets: list[int]) -> bytes:
    return json.dumps(
        [
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
            }
            for (name, tensor), offset in zip(named, offsets, strict=True)
        ]
    ).encode()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _view(
    view: mmap.mmap, dtype: torch.dtype, shape: torch.Size | list[int], offset: int
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).view(shape)
