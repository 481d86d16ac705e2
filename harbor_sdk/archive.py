"""Packs a task folder as tar.gz, and unpacks it.

Invariant: whatever the archive contains, unpacking writes nothing outside the target folder,
creates no link that points outside it, and uses no more disk and memory than the bounds. Packing
the same files gives the same bytes, so that another process can repeat a submission.

tarfile's `data` filter (no absolute links, no devices, no set-uid) is not enough: before Python
3.12.11, a long chain of links leads out of the target folder (CVE-2025-4517). Therefore no member
may lie below a link, and a link may only go up from its own real folder and then down.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from itertools import dropwhile
from pathlib import Path, PurePosixPath

from harbor_sdk.errors import AgentRunError

TASK_FILE = "task.toml"
MAX_MEMBERS = 100_000
MAX_HEADER_BYTES = 2**20
"""Bound on one extended header, which tarfile reads as a whole."""


def pack_task(folder: Path) -> bytes:
    """Returns a tar.gz of the folder under its own name, as the server expects it."""
    if not (folder / TASK_FILE).is_file():
        raise AgentRunError(
            f"{folder} has no {TASK_FILE}: give the folder of a Harbor task", code="invalid"
        )
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", encoding="utf-8") as tar,
    ):
        tar.add(folder.resolve(), arcname=folder.resolve().name)
    return buffer.getvalue()


def unpack_task(archive: Path, target: Path, *, max_bytes: int) -> Path:
    """Unpacks into `target`, and returns the folder in it that contains a task.toml."""
    try:
        with (
            gzip.open(archive) as content,
            tarfile.open(fileobj=_Bounded(content), encoding="utf-8") as tar,
        ):
            _extract(tar, target, max_bytes)
            _read_to_the_end(content)
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise AgentRunError(
            f"task_archive is not a valid tar.gz: {error}", code="invalid"
        ) from None
    for folder in (target, *sorted(path for path in target.iterdir() if path.is_dir())):
        if (folder / TASK_FILE).is_file():
            return folder
    raise AgentRunError(
        f"task_archive has no {TASK_FILE} at its top level or one folder below", code="invalid"
    )


def _extract(tar: tarfile.TarFile, target: Path, max_bytes: int) -> None:
    unpacked_bytes = 0
    for number, member in enumerate(tar, 1):
        unpacked_bytes += member.size
        if unpacked_bytes > max_bytes or number > MAX_MEMBERS:
            raise AgentRunError(
                f"task_archive unpacks to more than {max_bytes} bytes, or to more than "
                f"{MAX_MEMBERS} files: make the task smaller, or raise the server's --max-task-mb",
                code="too_large",
                status=413,
            )
        tar.extract(member, target, filter=_inside)


def _read_to_the_end(content: gzip.GzipFile) -> None:
    """Reads the padding after the last member, so that gzip compares the checksum of the
    content."""
    rest = content.read(MAX_HEADER_BYTES)
    if len(rest) == MAX_HEADER_BYTES or content.read(1):
        raise ValueError(f"more than {MAX_HEADER_BYTES} bytes follow the last file")


def _inside(member: tarfile.TarInfo, target: str) -> tarfile.TarInfo:
    """Returns the member as it may be unpacked. Raises ValueError if it could lead out of
    `target`."""
    kept = tarfile.data_filter(member, target)
    path = PurePosixPath(kept.name)
    if _goes_through_a_link(path.parent, Path(target)):
        raise ValueError(f"{member.name!r} lies below a link")
    if kept.issym():
        down = [*dropwhile(lambda part: part == "..", PurePosixPath(kept.linkname).parts)]
        ups = len(PurePosixPath(kept.linkname).parts) - len(down)
        if ".." in down or ups > len(path.parent.parts):
            raise ValueError(f"{member.name!r} links to {member.linkname!r}")
    if kept.islnk() and _goes_through_a_link(PurePosixPath(kept.linkname), Path(target)):
        raise ValueError(f"{member.name!r} links to {member.linkname!r}, through a link")
    return kept


def _goes_through_a_link(path: PurePosixPath, target: Path) -> bool:
    if ".." in path.parts:
        return True
    steps = [target / part for part in (path, *path.parents) if part.parts]
    return any(step.is_symlink() for step in steps)


class _Bounded(io.RawIOBase):
    """A file that refuses to read more than `MAX_HEADER_BYTES` at once, so that a header that
    claims to have a gigabyte does not fill the memory."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header has {size} bytes; at most {MAX_HEADER_BYTES} are allowed")
        return self._file.read(size)
