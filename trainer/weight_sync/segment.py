"""Stores tensors in a segment of shared memory that has no name and cannot outlive the trainer.

The memory is a Linux memfd. A reader on the same machine opens it as `/proc/PID/fd/FD`, where PID
is a small process that holds it, because other processes cannot access the trainer's own
descriptors (`machine/secrecy.py`). The holder ends with the trainer. Nothing is written to disk or
has to be deleted, and the memory is freed even if the trainer is killed.

Layout: the offset and the length of the index (8 bytes each, little-endian), then each tensor at an
offset aligned to 64 bytes, then the index (JSON: one `{name, dtype, shape, offset}` per tensor).
The index is last because tensors that are gathered from several ranks arrive one by one.

Invariant: `digest` covers every byte of every tensor, its position, name, dtype and shape. A reader
that computes the same digest holds exactly what was written.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from proxy.engines.segment_layout import HEAD_BYTES, aligned, new_digest, segment_head, title

_PIECE_BYTES = 1 << 20  # small enough that a copied piece is hashed while it is in the cache

HOLDER = ("cat",)
"""Ends when its standard input closes, which is when the writer ends, `kill -9` included."""

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """What a reader needs to know about one write."""

    path: str
    size_bytes: int
    digest: str


class SegmentWriter:
    """The segment of one writer. It grows as needed and is reused by every write."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("agentic-rl-weights")
        self._size_bytes = 0
        self._map: mmap.mmap | None = None
        self._begin_holder()

    @property
    def path(self) -> str:
        """Where readers find the memory: another path with each holder."""
        return f"/proc/{self._holder.pid}/fd/{self._fd}"

    @property
    def held(self) -> bool:
        """False after the holder has ended, by `kill -9` or for want of memory: readers do not find
        the memory."""
        return self._holder.poll() is None

    def hold(self) -> None:
        """Starts another holder if there is none. The memory's content is what it was."""
        if not self.held:
            os.close(self.reports)
            self._end_holder()
            self._begin_holder()

    def until_ended(self) -> None:
        """Waits for the end of a holder that has closed its descriptors: it ends at once."""
        self._holder.wait()

    def _begin_holder(self) -> None:
        self.reports, report_fd = os.pipe()
        """What readers write to `report_path`: a descriptor to read from."""
        self._holder = subprocess.Popen(
            HOLDER, stdin=subprocess.PIPE, pass_fds=(self._fd, report_fd)
        )
        os.close(report_fd)
        self.report_path = f"/proc/{self._holder.pid}/fd/{report_fd}"
        """The pipe by which readers report to the writer."""

    def _end_holder(self) -> None:
        self._holder.communicate()  # closes its standard input

    def write(self, tensors: Iterable[Named]) -> Written:
        """Copies the tensors into the segment one by one, from any device. Readers must not read at
        the same time."""
        entries: list[dict[str, Any]] = []
        end, total = HEAD_BYTES, new_digest()
        for name, tensor in tensors:
            offset = aligned(end)
            end = offset + tensor.numel() * tensor.element_size()
            entries.append(_entry(name, tensor, offset))
            target = _view(self._reserve(end), tensor.dtype, tensor.shape, offset)
            total.update(_title(name, target))
            for piece in _copied(tensor.detach(), target):
                total.update(_bytes(piece))
        index = json.dumps(entries).encode()
        whole = self._reserve(end + len(index))
        whole[end : end + len(index)] = index
        whole[:HEAD_BYTES] = segment_head(end, index)
        return Written(self.path, end + len(index), total.hexdigest())

    def close(self) -> None:
        self._map = None
        os.close(self._fd)
        os.close(self.reports)
        self._end_holder()

    def _reserve(self, size_bytes: int) -> mmap.mmap:
        if self._map is None or size_bytes > self._size_bytes:
            # The size doubles. Only written pages use memory, and earlier contents are kept.
            self._size_bytes = max(size_bytes, 2 * self._size_bytes)
            os.ftruncate(self._fd, self._size_bytes)
            self._map = mmap.mmap(self._fd, self._size_bytes)
        return self._map


class SegmentReader:
    """Reads one writer's segment repeatedly. The segment stays mapped between reads, because
    mapping it takes as long as copying it. The memory of a writer that has ended is therefore held
    until the segment of the next writer is read.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._file = (-1, -1)

    def receive(self, written: Written) -> list[Named]:
        """The tensors as views of the shared memory, after their digest was checked.

        Raises:
            FileNotFoundError: as `open_segment`.
            ValueError: the memory was changed after the write.
        """
        tensors = read(self._mapped(written))
        found = digest(tensors)
        if found != written.digest:
            raise ValueError(
                f"the received weights have digest {found}, but the trainer sent {written.digest}: "
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
        FileNotFoundError: its writer has ended, or runs on another machine or in another container.
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
    """XXH3 (128 bit) over each tensor's name, dtype, shape and bytes, in order."""
    total = new_digest()
    for name, tensor in tensors:
        add_to_digest(total, name, tensor)
    return total.hexdigest()


def add_to_digest(total: xxhash.xxh3_128, name: str, tensor: torch.Tensor) -> None:
    """Adds a contiguous tensor in host memory to a digest."""
    total.update(_title(name, tensor))
    total.update(_bytes(tensor.reshape(-1)))


def _title(name: str, tensor: torch.Tensor) -> bytes:
    return title(name, str(tensor.dtype).removeprefix("torch."), tensor.shape)


def _bytes(flat: torch.Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data


def _copied(source: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies the source, and yields each piece of the flat target after it is copied."""
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


def _view(
    view: mmap.mmap, dtype: torch.dtype, shape: torch.Size | list[int], offset: int
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=offset).view(shape)
