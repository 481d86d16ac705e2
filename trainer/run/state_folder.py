"""The folder `state/` of a checkpoint: weights, moments and schedules, as torch's DCP writes them.

It is read without running anyone's code: DCP's metadata is a pickle, and so are
its values that are not tensors; a stranger's checkpoint, or one in a bucket that others write,
could run code with them. Invariant: reading a folder calls only the constructors in `_ALLOWED`, and
a folder with anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from trainer.errors import CheckpointError

_METADATA = ".metadata"
_ALLOWED = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
        ("torch", "Size"),
        ("collections", "OrderedDict"),
    }
)
"""The classes and functions that DCP's metadata names, besides torch's types of numbers."""


class StateError(RuntimeError):
    """A rank could not write or read its part."""


def write_state(state: Mapping[str, Any], folder: Path) -> None:
    """Writes the state: each rank writes its shards. All ranks call this together.

    Raises OSError, or StateError if a rank failed.
    """
    with _one_process_is_meant(), _as_state_error():
        save_distributed(dict(state), checkpoint_id=folder)


def read_state(state: dict[str, Any], folder: Path) -> None:
    """Overwrites the tensors and values of `state`; all ranks call this together.

    Raises StateError: it is of another model, damaged, or would run code.
    """
    with _one_process_is_meant(), _as_state_error():
        load_distributed(state, storage_reader=_Reader(folder), planner=_Planner())


def check_whole(folder: Path) -> None:
    """Raises CheckpointError: the metadata cannot be read, or a file is missing or too short for
    what the metadata says is in it."""
    needed: dict[str, int] = {}
    try:
        for info in read_metadata(folder).storage_data.values():
            end = info.offset + info.length
            needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    except (AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / _METADATA} is damaged ({error!r:.120})") from error
    for name, size in needed.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if (found := path.stat().st_size) < size:
            raise CheckpointError(f"{path} has {found:,} bytes of {size:,}")


def read_metadata(folder: Path) -> Metadata:
    """Raises CheckpointError: it is missing, damaged, or names what is not DCP's."""
    path = folder / _METADATA
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r:.120})") from error
    except (AttributeError, MemoryError, OverflowError) as error:  # of garbage
        raise CheckpointError(f"{path} is damaged ({error!r:.120})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is not the metadata of a checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(
            f"names {module}.{name}, which is not part of a checkpoint; it would run code"
        )


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As its superclass, after the value was read without running code; torch then reads its
        own copy of that."""
        try:
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{read_item.dest_index.fqn}: not a plain value; it would run code ({error!s:.120})"
            ) from error
        own = io.BytesIO()
        torch.save(plain, own)
        own.seek(0)
        super().load_bytes(read_item, own)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Suppresses DCP's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@contextmanager
def _as_state_error() -> Iterator[None]:
    """DCP's own exception of what failed on some rank is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise StateError(str(error)) from error
