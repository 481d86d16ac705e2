"""Pulls published weights into one file on this machine, from which an engine loads them.

    FOLDER/RUN.v000012-019e5c41aa07.weights     a segment with every tensor (`publication.py`)
          /.pulling                         one that is being made; deleted at the next pull
          /adapters                         LoRA adapters (`adapter_folders.py`)

Invariant: a `.weights` file has the digest of its publication. It is renamed to its name only when
the digest was computed from its own bytes, so that a worker that is killed, or a file that is cut
or corrupted on the way, never leaves one with other bytes. The folder holds at most two versions.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxy.engines.segment_layout import HEAD_BYTES, new_digest, segment_head, title
from proxy.extras.relay.weights.adapter_folders import AdapterFolders
from proxy.extras.relay.weights.delta import Bits, apply
from proxy.extras.relay.weights.publication import (
    BadPublicationError,
    Files,
    Manifest,
    StoredPiece,
    offsets,
    segment_index,
)
from proxy.extras.relay.weights.published_files import PublishedFiles, PullError

SUFFIX = ".weights"


@dataclass(frozen=True, slots=True)
class LocalWeights:
    """A whole version on this machine."""

    manifest: Manifest
    path: Path
    """The file, or an adapter's folder."""
    size_bytes: int
    """Size of the file, with its index."""
    pulled_bytes: int
    """Number of bytes that were read from the URL for it."""


class WeightStore:
    """Example:
    store = WeightStore("s3://bucket/weights", Path("/var/cache/weights"))
    local = store.pull("run-a/v000012-019e5c41aa07", lambda: False)
    """

    def __init__(self, url: str, folder: Path, model: str | None = None) -> None:
        """`url` is what the trainer has as `engine.publish`, as this machine reaches it. One worker
        alone may use `folder`. `model`: the digest of the engine's architecture; None: any.

        Raises:
            ConfigurationError: no installed file system serves the URL.
        """
        self._files = PublishedFiles(url, folder)
        self._folder = folder
        self._model = model
        self.adapters = AdapterFolders(self._files, folder)

    def pull(self, name: str, stopped: Callable[[], bool]) -> LocalWeights:
        """Makes the version's file, from a version that is here and the deltas after it where that
        is fewer bytes, else from the newest full one. Deletes others except the last one. Of an
        adapter, makes its folder.

        Raises:
            PullError: it could not be read, is corrupted, or the folder has no room.
            PullStopped: `stopped` returned True.
        """
        with self._files.pulling(name, stopped):
            manifest = self._files.manifest(name)
            if None not in (self._model, manifest.model) and self._model != manifest.model:
                raise PullError(
                    f"the weights {name} are of another model than the engine's: the architecture "
                    f"is {str(manifest.model)[:12]}, the engine's is {str(self._model)[:12]} "
                    "(SHA-256 of config.json); start engine and worker with the trainer's model"
                )
            if manifest.adapter is not None:
                path = self.adapters.make(manifest, manifest.adapter)
            else:
                path = self._path(name)
                if not path.is_file():
                    self._make(manifest, path)
                self._keep(path)
            return LocalWeights(manifest, path, path.stat().st_size, self._files.pulled_bytes)

    def is_whole(self, local: LocalWeights) -> bool:
        """Whether the file of weights still has the published bytes."""
        with local.path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with memory, suppress(BadPublicationError):
                _check(local.manifest, memory, lambda: None)
                return True
        return False

    def forget(self, name: str) -> None:
        """Deletes a version of weights whose file has other bytes than were published."""
        self._path(name).unlink(missing_ok=True)

    def _make(self, manifest: Manifest, path: Path) -> None:
        partial = self._folder / ".pulling"
        partial.unlink(missing_ok=True)
        steps = self._steps(manifest)
        _, end = offsets(manifest.tensors)
        index = segment_index(manifest.tensors)
        first = steps[0]
        if first.full_of is None:
            shutil.copyfile(self._path(first.name), partial)
        with partial.open("r+b" if first.full_of is None else "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, end + len(index))  # or a full disk would end us
            with mmap.mmap(file.fileno(), end + len(index)) as memory:
                for step in steps:
                    if step.files is not None:
                        self._write(step.name, step.files, manifest, memory)
                memory[:HEAD_BYTES] = segment_head(end, index)
                memory[end:] = index
                try:
                    _check(manifest, memory, self._files.check_stopped)
                except BadPublicationError:
                    self.forget(first.name)  # whose file may have changed since it was made
                    raise
        partial.rename(path)

    def _steps(self, manifest: Manifest) -> list[_Step]:
        """What makes the version: one that is here or a full one, and the deltas after it."""
        deltas, costs, found = list[_Step](), 0, list[tuple[int, int, list[_Step]]]()
        here: Manifest | None = manifest
        seen = set[str]()
        while here is not None:
            if here.name in seen:
                raise BadPublicationError(f"{here.name} depends on itself")
            seen.add(here.name)
            if here.full is not None:
                start = _Step(here.name, here.full, full_of=here)
                found.append((here.full.size_bytes + costs, len(found), [start, *deltas]))
            if here.base is None or here.delta is None:
                break
            deltas, costs = [_Step(here.name, here.delta), *deltas], costs + here.delta.size_bytes
            if self._path(here.base).is_file():
                found.append((costs, len(found), [_Step(here.base), *deltas]))
            if found and costs >= min(found)[0]:
                break
            try:
                here = self._files.manifest(here.base)
            except FileNotFoundError:  # deleted as too old
                break
        if not found:
            raise BadPublicationError(f"{manifest.name} has no full version before it")
        return min(found)[2]

    def _write(self, name: str, files: Files, manifest: Manifest, memory: mmap.mmap) -> None:
        places, _ = offsets(manifest.tensors)
        for number, about in enumerate(files.files):
            pieces = [each for each in files.pieces if each.file == number]
            with tempfile.TemporaryFile(dir=self._folder) as copy:
                self._files.fetch(f"{name}/{about.name}", about, copy)
                if about.size_bytes == 0:
                    continue
                with mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) as stored:
                    for piece in pieces:
                        self._files.check_stopped()
                        _place(piece, manifest, places, stored, memory)

    def _keep(self, path: Path) -> None:
        """Deletes all versions but this one and the newest of the others, which the engine may
        still read."""
        others = [each for each in self._folder.glob(f"*{SUFFIX}") if each != path]
        others.sort(key=lambda each: each.stat().st_mtime_ns)
        for each in others[:-1]:
            each.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / (name.replace("/", ".") + SUFFIX)


@dataclass(frozen=True, slots=True)
class _Step:
    """One of the publications that make a version."""

    name: str
    files: Files | None = None
    """What is read of it; None: the file that is here."""
    full_of: Manifest | None = None
    """The publication of a full version; None: a delta, or the file that is here."""


def _check(manifest: Manifest, memory: mmap.mmap, between: Callable[[], None]) -> None:
    """Raises BadPublicationError: the segment has other bytes than were published. `between` is
    called between tensors."""
    total, (places, _) = new_digest(), offsets(manifest.tensors)
    with memoryview(memory) as view:
        for tensor, place in zip(manifest.tensors, places, strict=True):
            between()
            total.update(title(tensor.name, tensor.dtype, tensor.shape))
            with view[place : place + tensor.size_bytes] as content:
                total.update(content)
    if total.hexdigest() != manifest.digest:
        raise BadPublicationError(
            f"{manifest.name}: the weights have digest {total.hexdigest()}, and those that the "
            f"trainer published have {manifest.digest}"
        )


def _place(
    piece: StoredPiece,
    manifest: Manifest,
    places: Sequence[int],
    stored: mmap.mmap,
    memory: mmap.mmap,
) -> None:
    """Writes a piece into the segment. Raises BadPublicationError."""
    if not 0 <= piece.tensor < len(places):
        raise BadPublicationError(f"{manifest.name} has no tensor {piece.tensor}")
    tensor = manifest.tensors[piece.tensor]
    if piece.start < 0 or piece.count < 0 or piece.start + piece.count > tensor.count:
        raise BadPublicationError(f"{manifest.name}: {tensor.name} has {tensor.count} elements")
    content = stored[piece.offset : piece.offset + piece.size_bytes]
    begin = places[piece.tensor] + piece.start * tensor.item_bytes
    if piece.form == "raw":
        if len(content) != piece.count * tensor.item_bytes:
            raise BadPublicationError(f"{manifest.name}: {tensor.name} is cut")
        memory[begin : begin + len(content)] = content
        return
    bits: Bits = np.frombuffer(memory, f"<u{tensor.item_bytes}", piece.count, begin)
    problem = ""
    try:
        apply(content, bits)
    except ValueError as error:
        problem = str(error)  # not the error: its traceback holds `bits`
    del bits  # or the memory could not be closed
    if problem:
        raise BadPublicationError(f"{manifest.name}: {tensor.name}: {problem}")
