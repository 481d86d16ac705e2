"""A published version of weights: what lies where, and how a reader checks it.

    URL/RUN/v000012-019e5c41aa07/full-00000.safetensors    every tensor, only in every k-th version
                            /delta-00000.bin           what changed since the version before
                            /manifest.json             all of this, written last
    URL/RUN/v000013-019e5c41aa33/adapter_model.safetensors, manifest.json     a LoRA adapter

Invariants: a publication counts only with its manifest, which is written last and never changes.
Its digest covers the name, type, shape and bytes of every tensor, so that a reader that computes it
holds exactly the published weights, whichever files it read. Full and delta give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from proxy.engines.segment_layout import HEAD_BYTES, aligned
from proxy.records import POLICY_NAME

FORMAT = 1
MANIFEST = "manifest.json"
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Name of a type in torch → its name in safetensors, and its size in bytes."""

ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}/v[0-9]{6,10}-[0-9a-f]{12}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ADAPTER = re.compile(POLICY_NAME.pattern + r"@([0-9]{1,10}|check)\.[0-9a-f]{16}")


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """Example: Tensor("lm_head.weight", "bfloat16", (4096, 64), "float32")"""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trained: str
    """The type in which it is trained; `dtype` may be narrower."""

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def count(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def size_bytes(self) -> int:
        return self.count * self.item_bytes


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of a publication."""

    name: str
    size_bytes: int
    sha256: str


class StoredPiece(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive elements of a tensor, as bytes of a file."""

    tensor: int
    """Its number in `Manifest.tensors`."""
    start: int
    """Number of the first element."""
    count: int
    file: int
    """Its number in `Files.files`."""
    offset: int
    size_bytes: int
    form: Literal["raw", "sparse"]
    """`sparse`: only what changed, see `delta.py`."""


class Files(msgspec.Struct, frozen=True):
    """The files of a full version or of a delta."""

    files: tuple[File, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ProbeScores(msgspec.Struct, frozen=True):
    """The trainer's log-probabilities of `ids[1:]` on these weights, each given the ids before."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    """Maximum mean |Δ log p| of an engine that serves these weights."""


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter in PEFT's format, on the weights with which the engines were started. The only
    file of `Manifest.full` is its ADAPTER_FILE; there are no `tensors` and no deltas."""

    name: str
    """The engines' name of this version: `POLICY@VERSION.DIGEST`."""
    config: str
    """The content of its ADAPTER_CONFIG."""
    base: ProbeScores | None = None
    """The scores of the weights that it adapts, without it."""
    check: str | None = None
    """The publication of a random adapter on the same weights, by which an engine is tested."""

    @property
    def policy(self) -> str:
        return self.name.rpartition("@")[0]


class Manifest(msgspec.Struct, frozen=True):
    """What lies in a publication's folder."""

    name: str
    """`RUN/vVERSION-TIME`, its folder below the URL."""
    version: int
    digest: str
    tensors: tuple[Tensor, ...]
    full: Files | None = None
    base: str | None = None
    """The publication to which `delta` applies; it has the same tensors."""
    delta: Files | None = None
    probe: ProbeScores | None = None
    adapter: Adapter | None = None
    model: str | None = None
    """Digest of the architecture (`fingerprint`), so that no engine of another one loads it."""
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class BadPublicationError(Exception):
    """A publication is incomplete or corrupted; the message names the file."""


def check_name(name: str) -> str:
    """Raises ValueError: it is not the name of a publication."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:120]!r} is not RUN/vVERSION-TIME, the name of published weights")
    return name


def version_of(name: str) -> int:
    """The version in the name of a publication."""
    return int(name.rpartition("/v")[2].partition("-")[0])


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Raises BadPublicationError: it cannot be read, or belongs to another publication."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BadPublicationError(f"{name}/{MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise BadPublicationError(
            f"{name}/{MANIFEST} has format {manifest.format}, and this release reads {FORMAT}; run "
            "the same release for trainer and worker"
        )
    if problem := _problem(manifest, name):
        raise BadPublicationError(f"{name}/{MANIFEST} {problem}")
    return manifest


def _problem(manifest: Manifest, name: str) -> str:
    """Why a reader must not use it; empty: it may. No name leaves the folder of the URL."""
    if manifest.name != name:
        return f"is of {manifest.name[:120]}"
    if unknown := sorted({each.dtype for each in manifest.tensors} - DTYPES.keys()):
        return f"has tensors of the types {unknown}"
    if any(size < 0 for each in manifest.tensors for size in each.shape):
        return "has a tensor of a negative size"
    files = [file for part in (manifest.full, manifest.delta) if part for file in part.files]
    for file in files:
        if _FILE.fullmatch(file.name) is None or file.size_bytes < 0:
            return f"has a file {file.name[:120]!r} of {file.size_bytes} bytes"
    adapter = manifest.adapter
    for other in (manifest.base, None if adapter is None else adapter.check):
        if other is not None and (_NAME.fullmatch(other) is None or _run(other) != _run(name)):
            return f"depends on {other[:120]!r}, which is not a publication of its run"
    if adapter is not None and (_ADAPTER.fullmatch(adapter.name) is None or len(files) != 1):
        return f"has an adapter {adapter.name[:120]!r} of {len(files)} files"
    return ""


def _run(name: str) -> str:
    return name.partition("/")[0]


def offsets(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a segment (`segment_index`), and where the last one ends."""
    found, end = list[int](), HEAD_BYTES
    for tensor in tensors:
        found.append(aligned(end))
        end = found[-1] + tensor.size_bytes
    return found, end


def segment_index(tensors: Sequence[Tensor]) -> bytes:
    """The index at the end of a segment. A segment is one file or memory with all tensors: its
    head, each tensor at an aligned offset, then the index."""
    places, _ = offsets(tensors)
    entries: list[dict[str, Any]] = [
        {"name": each.name, "dtype": each.dtype, "shape": list(each.shape), "offset": at}
        for each, at in zip(tensors, places, strict=True)
    ]
    return msgspec.json.encode(entries)


def shards(tensors: Sequence[Tensor], most_bytes: int) -> Iterator[list[int]]:
    """Consecutive tensors' numbers, of at most `most_bytes` together; a larger one is alone."""
    shard, size = list[int](), 0
    for number, tensor in enumerate(tensors):
        if shard and size + tensor.size_bytes > most_bytes:
            yield shard
            shard, size = [], 0
        shard.append(number)
        size += tensor.size_bytes
    if shard:
        yield shard


def safetensors_head(tensors: Sequence[Tensor]) -> bytes:
    """The beginning of a safetensors file with these tensors, after which their bytes follow."""
    described: dict[str, Any] = {}
    end = 0
    for each in tensors:
        described[each.name] = {
            "dtype": DTYPES[each.dtype][0],
            "shape": each.shape,
            "data_offsets": (end, end := end + each.size_bytes),
        }
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
