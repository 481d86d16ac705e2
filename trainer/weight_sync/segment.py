"""Tensors in one piece of shared memory that has no name and cannot outlive the trainer.

The memory is a Linux memfd. A reader on the same machine opens it as `/proc/PID/fd/FD`, so nothing
is written to disk, nothing has to be unlinked, and a killed trainer leaks nothing.

Layout: where the index is and how long (8 bytes each, little-endian), each tensor at its
64-byte-aligned offset, then the index (JSON: one `{name, dtype, shape, offset}` per tensor). The
index comes last because tensors that are gathered from several ranks come one by one.

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
from typing import Any

import torch
import xxhash

ALIGN_BYTES = 64  # a cache line; also enough for any dtype's own alignment
_HEAD_BYTES = 16
_PIECE_BYTES = 1 << 20  # what was copied is hashed while it is still in the cache

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
        """Copies the tensors in, one by one (from any device). Readers must not read meanwhile."""
        entries: list[dict[str, Any]] = []
        end, total = _HEAD_BYTES, xxhash.xxh3_128()
        for name, tensor in tensors:
            offset = _aligned(end)
            end = offset + tensor.numel() * tensor.element_size()
            entries.append(_entry(name, tensor, offset))
            target = _view(self._reserve(end), tensor.dtype, tensor.shape, offset)
            total.update(_title(name, target))
            for piece in _copied(tensor.detach(), target):
                total.update(_bytes(piece))
        index = json.dumps(entries).encode()
        whole = self._reserve(end + len(index))
        whole[end : end + len(index)] = index
        whole[:_HEAD_BYTES] = end.to_bytes(8, "little") + len(index).to_bytes(8, "little")
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return Written(path, end + len(index), total.hexdigest())

    def close(self) -> None:
        self._map = None
        os.close(self._fd)

    def _reserve(self, size_bytes: int) -> mmap.mmap:
        if self._map is None or size_bytes > self._size_bytes:
            # Doubling: memory is taken when it is written to, and what was written stays.
            self._size_bytes = max(size_bytes, 2 * self._size_bytes)
            os.ftruncate(self._fd, self._size_bytes)
            self._map = mmap.mmap(self._fd, self._size_bytes)
        return self._map


class SegmentReader:
    """Reads one writer's segment again and again. It stays mapped from read to read, as to map it
    costs as much as to copy it; so a dead writer's memory is held until its successor's is read.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._file = (-1, -1)

    def receive(self, written: Written) -> list[Named]:
        """The tensors, as views of the shared memory, once their digest shows that they are whole.

        Raises:
            FileNotFoundError: as `open_segment`.
            ValueError: the memory was written to since.
        """
        tensors = read(self._mapped(written))
        found = digest(tensors)
        if found != written.digest:
            raise ValueError(
                f"weights received have digest {found}, the trainer sent {written.digest}: "
                "the shared memory was written to during the update"
            )
        return tensors

    def close(self) -> None:
        self._map = None

    def _mapped(self, written: Written) -> mmap.mmap:
        status = Path(written.path).stat()
        file = (status.st_dev, status.st_ino)
        if self._map is None or file != self._file or len(self._map) < written.size_bytes:
            self._map = open_segment(written.path, status.st_size)
            self._file = file
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
    start, length = (int.from_bytes(view[at : at + 8], "little") for at in (0, 8))
    return [
        (
            entry["name"],
            _view(view, getattr(torch, entry["dtype"]), entry["shape"], entry["offset"]),
        )
        for entry in json.loads(view[start : start + length])
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


def _entry(name: str, tensor: torch.Tensor, offset: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset}


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _view(
    view: mmap.mmap, dtype: torch.dtype, shape: torch.Size | list[int], offset: int
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).view(shape)
