"""Publishes versions of the weights as files, for engines that no collective reaches.

Each version is a folder at a URL of any file system that fsspec knows (`relay.weights`). It holds
what changed since the version before it; the first one, and every k-th one after it, also holds all
tensors as safetensors shards.

Invariant: one tensor at a time is in memory, and the version before is a file without a name on
this machine's disk, of the size of the weights.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch

from proxy.engines.segment_layout import new_digest, title
from proxy.extras.relay.weights.delta import CHUNK, Bits, changes
from proxy.extras.relay.weights.publication import (
    File,
    Files,
    Manifest,
    ProbeScores,
    StoredPiece,
    Tensor,
    offsets,
    safetensors_head,
    shards,
)
from trainer.errors import WeightSyncError
from trainer.extras.relay.run_publications import RunPublications, Upload
from trainer.weight_sync.dtypes import dtype_name
from trainer.weight_sync.published import Published
from trainer.weight_sync.segment import Named

SHARD_BYTES = 1 << 29
"""Largest size of a file; a larger tensor is a file of its own. A reader needs this much room."""


class Publisher:
    """Example:
    publisher = Publisher("s3://bucket/weights", "run-a", Path("runs/run-a"), full_every=10)
    publisher.publish(weights, described(shapes, sent), 12)
    """

    def __init__(
        self, url: str, run: str, scratch: Path, *, full_every: int, model: str | None = None
    ) -> None:
        """`run` names the run's folder at the URL. `scratch` is a folder for the file with the
        last version. Every `full_every`-th version is full. `model`: the digest of the
        architecture.

        Raises:
            ConfigError: no installed file system serves the URL.
        """
        self._run = RunPublications(url, run, model)
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
        last, self._last = self._last, None  # an update that fails leaves half of a version there
        if last is not None and last.tensors != tuple(tensors):
            last.close()
            last = None
        base = None if last is None else last.name
        is_full = base is None or self._since_full + 1 >= self._full_every
        with self._run.writing(version) as name:
            last = last or _LastVersion(tuple(tensors), self._scratch)
            with ExitStack() as stack:
                full = _FullWriter(self._run, name, tensors) if is_full else None
                delta = None if base is None else _DeltaWriter(self._run, name)
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
            self._run.commit(manifest)
            last.name, self._last = name, last
            self._since_full = 0 if is_full else self._since_full + 1
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


class _FullWriter:
    """Writes all tensors as safetensors shards."""

    def __init__(self, run: RunPublications, name: str, tensors: Sequence[Tensor]) -> None:
        self._run, self._name, self._tensors = run, name, tensors
        self._first = {shard[0]: shard for shard in shards(tensors, SHARD_BYTES)}
        """Number of the first tensor of each shard → the numbers of all of them."""
        self._upload: Upload | None = None
        self._files, self._pieces = list[File](), list[StoredPiece]()

    def add(self, number: int, _: Bits, new: Bits) -> None:
        if (shard := self._first.get(number)) is not None:
            self._end()
            self._upload = self._run.upload(self._name, f"full-{len(self._files):05d}.safetensors")
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

    def __init__(self, run: RunPublications, name: str) -> None:
        self._run, self._name = run, name
        self._upload: Upload | None = None
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
            self._upload = self._run.upload(self._name, f"delta-{len(self._files):05d}.bin")
        at, offset = len(self._files), self._upload.size_bytes
        self._pieces.append(msgspec.structs.replace(piece, file=at, offset=offset))
        self._upload.write(content)
        if self._upload.size_bytes >= SHARD_BYTES:
            self._end()

    def _end(self) -> None:
        if self._upload is not None:
            self._files.append(self._upload.finish())
            self._upload = None
