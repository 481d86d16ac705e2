"""Publishes versions of the weights as files, for engines that no collective reaches.

Each version is a folder at a URL of any file system that fsspec knows (`proxy.weights`). It holds
what changed since the version before it; the first one, and every k-th one after it, also holds all
tensors as safetensors shards.

Invariants: one tensor at a time is in memory, and the version before is a file without a name on
this machine's disk, of the size of the weights. A version counts from its manifest on, which is
written last: a process that is killed in between leaves files that no reader finds and that the
next version deletes. The last KEPT_FULL full versions are kept, with the deltas after them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch

from proxy.errors import ConfigurationError
from proxy.shown_config import without_credentials
from proxy.weights.delta import CHUNK, Bits, changes
from proxy.weights.file_system import FileSystem, file_system_errors, one_line
from proxy.weights.publication import (
    MANIFEST,
    File,
    Files,
    Manifest,
    ProbeScores,
    StoredPiece,
    Tensor,
    encode_manifest,
    new_digest,
    offsets,
    safetensors_head,
    shards,
    title,
)
from trainer.errors import ConfigError, WeightSyncError
from trainer.weight_sync.dtypes import dtype_name
from trainer.weight_sync.segment import Named

KEY = "engine.publish"
KEPT_FULL = 2
"""Number of full versions that are kept. A reader of the older one still finds all of its files."""
FIRST_FULL = "full-00000.safetensors"
SHARD_BYTES = 1 << 29
"""Largest size of a file; a larger tensor is a file of its own. A reader needs this much room."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that readers can pull.

    Example: Published("run-a/v000012-019e5c41aa07", 12, size_bytes=16_400_000_000, …)
    """

    name: str
    version: int
    size_bytes: int
    """Size of the tensors."""
    delta_bytes: int
    """Size of the files that contain the changes since the version before; 0: there are none."""
    full_bytes: int
    """Size of the files that contain all tensors; 0: there are none."""


class Publisher:
    """Example:
    publisher = Publisher("s3://bucket/weights", "run-a", Path("runs/run-a"), full_every=10)
    publisher.publish(weights, described(shapes, sent), 12)
    """

    def __init__(self, url: str, run: str, scratch: Path, *, full_every: int) -> None:
        """`run` names the run's folder at the URL. `scratch` is a folder for the file with the
        last version. Every `full_every`-th version is full.

        Raises:
            ConfigError: no installed file system serves the URL.
        """
        self.url = without_credentials(url).rstrip("/")
        try:
            self._system = FileSystem.at(url)
        except ConfigurationError as error:
            raise ConfigError(f"{KEY}={self.url}: {error.message}") from error
        self._run = run
        self._scratch = scratch
        self._full_every = full_every
        self._last: _LastVersion | None = None
        self._since_full = 0

    def publish(
        self,
        weights: Iterable[Named],
        tensors: Sequence[Tensor],
        version: int,
        probe: ProbeScores | None = None,
    ) -> Published:
        """Writes the weights, in the types of `tensors` and in their order.

        Raises:
            WeightSyncError: they could not be written; earlier versions are unchanged.
        """
        name = f"{self._run}/v{version:06d}-{time.time_ns() // 1_000_000:012x}"
        last, self._last = self._last, None  # an update that fails leaves half of a version there
        if last is not None and last.tensors != tuple(tensors):
            last.close()
            last = None
        base = None if last is None else last.name
        is_full = base is None or self._since_full + 1 >= self._full_every
        with self._errors(name):
            last = last or _LastVersion(tuple(tensors), self._scratch)
            with ExitStack() as stack:
                full = _FullWriter(self._system, name, tensors) if is_full else None
                delta = None if base is None else _DeltaWriter(self._system, name)
                writers = [each for each in (full, delta) if each is not None]
                for each in writers:
                    stack.callback(each.discard)
                digest = _write(weights, last, writers)
                manifest = Manifest(
                    name,
                    version,
                    digest,
                    last.tensors,
                    full=None if full is None else full.finish(),
                    base=base,
                    delta=None if delta is None else delta.finish(),
                    probe=probe,
                )
            self._system.make_folder_of(self._path(name, MANIFEST))
            self._system.files.pipe_file(self._path(name, MANIFEST), encode_manifest(manifest))
            last.name, self._last = name, last
            self._since_full = 0 if is_full else self._since_full + 1
            self._prune(name)
        return Published(
            name,
            version,
            manifest.size_bytes,
            manifest.delta.size_bytes if manifest.delta else 0,
            manifest.full.size_bytes if manifest.full else 0,
        )

    def close(self) -> None:
        if self._last is not None:
            self._last.close()
            self._last = None

    def _prune(self, newest: str) -> None:
        """Deletes versions before the oldest full one that is kept, and incomplete ones."""
        files, root = self._system.files, self._path(self._run)
        files.invalidate_cache()
        found = dict[str, set[str]]()
        for path in files.find(root):
            version, _, file = str(path)[len(root) + 1 :].rpartition("/")
            found.setdefault(version, set()).add(file)
        newest = newest.rpartition("/")[2]
        whole = sorted(
            (each for each in found if MANIFEST in found[each]),
            key=lambda each: (each == newest, each.rpartition("-")[2]),
        )
        full = [each for each in whole if FIRST_FULL in found[each]]
        kept = whole[whole.index(full[-KEPT_FULL:][0]) :]
        for each in found.keys() - set(kept):
            if MANIFEST in found[each]:  # first, so that the version no longer counts
                files.rm(f"{root}/{each}/{MANIFEST}")
            files.rm(f"{root}/{each}", recursive=True)

    def _path(self, *names: str) -> str:
        return "/".join([self._system.root, *names])

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except file_system_errors() as error:
            raise WeightSyncError(
                f"{KEY}: {self.url} cannot get the weights {name} ({one_line(error)}); check the "
                f"URL, the credentials, and the free space there and in {self._scratch}, then "
                "start the run again: it continues from its last checkpoint"
            ) from error


def described(trained: Sequence[Named], sent: Sequence[Named]) -> list[Tensor]:
    """The tensors of a version: `trained` without contents, and the same in the types in which they
    are sent."""
    return [
        Tensor(name, dtype_name(as_sent.dtype), tuple(as_sent.shape), dtype_name(tensor.dtype))
        for (name, tensor), (_, as_sent) in zip(trained, sent, strict=True)
    ]


class _LastVersion:
    """The bytes of the last version, in a file without a name, which the kernel deletes when this
    process ends."""

    def __init__(self, tensors: tuple[Tensor, ...], folder: Path) -> None:
        self.tensors = tensors
        self.name: str | None = None
        """The publication; None: not yet whole."""
        self._places, end = offsets(tensors)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, end)  # or a full disk would end this process
            self._memory = mmap.mmap(file.fileno(), end)

    def bits(self, number: int) -> Bits:
        """The elements of a tensor, which may be overwritten."""
        tensor, place = self.tensors[number], self._places[number]
        return np.frombuffer(self._memory, f"<u{tensor.item_bytes}", tensor.count, place)

    def close(self) -> None:
        self._memory.close()


def _write(
    weights: Iterable[Named],
    last: _LastVersion,
    writers: Sequence[_FullWriter | _DeltaWriter],
) -> str:
    """Gives each tensor to the writers, and then makes it the last version's. Returns the digest.

    Raises:
        WeightSyncError: the weights are not the tensors that were described.
    """
    total, number = new_digest(), 0
    for name, tensor in weights:
        about = last.tensors[number] if number < len(last.tensors) else None
        if about is None or (name, tensor.shape) != (about.name, about.shape):
            raise WeightSyncError(f"the policy has a weight {name} that it did not describe")
        new = _bits(tensor, about)
        total.update(title(about.name, about.dtype, about.shape))
        total.update(new.data)
        old = last.bits(number)
        for writer in writers:
            writer.add(number, old, new)
        old[:] = new
        del old, new, tensor  # none is held while the next one is gathered
        number += 1
    if number != len(last.tensors):
        raise WeightSyncError(f"the policy gave {number} of {len(last.tensors)} weights")
    return total.hexdigest()


def _bits(tensor: torch.Tensor, about: Tensor) -> Bits:
    if dtype_name(tensor.dtype) != about.dtype:
        raise WeightSyncError(f"{about.name} has type {tensor.dtype}, expected {about.dtype}")
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    bits: Bits = flat.view(f"<u{about.item_bytes}")
    return bits


class _Upload:
    """A file of a publication, written in one pass."""

    def __init__(self, system: FileSystem, path: str) -> None:
        system.make_folder_of(path)
        self._name = path.rpartition("/")[2]
        self._file: IO[bytes] | Any = system.files.open(path, "wb")
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        self._digest.update(content)
        self._file.write(content)
        self.size_bytes += len(content)

    def finish(self) -> File:
        self._file.close()
        return File(self._name, self.size_bytes, self._digest.hexdigest())

    def discard(self) -> None:
        """Ends an upload that is not finished; a later version deletes what is there of it."""
        if not self._file.closed:
            with suppress(*file_system_errors()):
                self._file.close()


class _FullWriter:
    """Writes all tensors as safetensors shards."""

    def __init__(self, system: FileSystem, name: str, tensors: Sequence[Tensor]) -> None:
        self._system, self._folder, self._tensors = system, f"{system.root}/{name}", tensors
        self._first = {shard[0]: shard for shard in shards(tensors, SHARD_BYTES)}
        """Number of the first tensor of each shard → the numbers of all of them."""
        self._upload: _Upload | None = None
        self._files, self._pieces = list[File](), list[StoredPiece]()

    def add(self, number: int, _: Bits, new: Bits) -> None:
        if (shard := self._first.get(number)) is not None:
            self._end()
            path = f"{self._folder}/full-{len(self._files):05d}.safetensors"
            self._upload = _Upload(self._system, path)
            self._upload.write(safetensors_head([self._tensors[each] for each in shard]))
        assert self._upload is not None
        offset, size = self._upload.size_bytes, new.nbytes
        self._upload.write(new.view(np.uint8).data)
        self._pieces.append(StoredPiece(number, 0, len(new), len(self._files), offset, size, "raw"))

    def finish(self) -> Files:
        self._end()
        return Files(tuple(self._files), tuple(self._pieces))

    def discard(self) -> None:
        if self._upload is not None:
            self._upload.discard()

    def _end(self) -> None:
        if self._upload is not None:
            self._files.append(self._upload.finish())
            self._upload = None


class _DeltaWriter:
    """Writes what changed of each tensor, in pieces of `CHUNK` elements."""

    def __init__(self, system: FileSystem, name: str) -> None:
        self._system, self._folder = system, f"{system.root}/{name}"
        self._upload: _Upload | None = None
        self._files, self._pieces = list[File](), list[StoredPiece]()

    def add(self, number: int, old: Bits, new: Bits) -> None:
        for start in range(0, len(new), CHUNK):
            part = new[start : start + CHUNK]
            changed = changes(old[start : start + CHUNK], part)
            if changed is None:
                continue
            if len(changed) < part.nbytes:
                self._store(
                    StoredPiece(number, start, len(part), 0, 0, len(changed), "sparse"), changed
                )
            else:
                raw = part.view(np.uint8).data
                self._store(StoredPiece(number, start, len(part), 0, 0, part.nbytes, "raw"), raw)

    def finish(self) -> Files:
        self._end()
        return Files(tuple(self._files), tuple(self._pieces))

    def discard(self) -> None:
        if self._upload is not None:
            self._upload.discard()

    def _store(self, piece: StoredPiece, content: bytes | memoryview) -> None:
        if self._upload is None:
            path = f"{self._folder}/delta-{len(self._files):05d}.bin"
            self._upload = _Upload(self._system, path)
        at, offset = len(self._files), self._upload.size_bytes
        self._pieces.append(msgspec.structs.replace(piece, file=at, offset=offset))
        self._upload.write(content)
        if self._upload.size_bytes >= SHARD_BYTES:
            self._end()

    def _end(self) -> None:
        if self._upload is not None:
            self._files.append(self._upload.finish())
            self._upload = None
