"""A task folder as tar.gz and back.

Invariant: unpacking never writes outside its folder and never more than the bound, whatever the
archive says (tarfile's `data` filter: no absolute paths, no `..`, no devices, no links outside).
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from harbor_sdk.errors import AgentRunError

TASK_FILE = "task.toml"


def pack_task(folder: Path) -> bytes:
    """The folder under its own name, as the server expects it."""
    if not (folder / TASK_FILE).is_file():
        raise AgentRunError(f"{folder} has no {TASK_FILE}: not a Harbor task", code="invalid")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder.resolve(), arcname=folder.resolve().name)
    return buffer.getvalue()


def unpack_task(archive: Path, target: Path, *, max_bytes: int) -> Path:
    """Unpacks into `target`; returns the folder in it that has a task.toml."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            unpacked_bytes = 0
            for member in tar:
                unpacked_bytes += member.size
                if unpacked_bytes > max_bytes:
                    raise AgentRunError(
                        f"task_archive unpacks to more than {max_bytes} bytes: make the task "
                        "smaller, or raise the server's --max-task-mb",
                        code="too_large",
                        status=413,
                    )
                tar.extract(member, target, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise AgentRunError(
            f"task_archive is not a sound tar.gz: {error}", code="invalid"
        ) from None
    for folder in (target, *sorted(path for path in target.iterdir() if path.is_dir())):
        if (folder / TASK_FILE).is_file():
            return folder
    raise AgentRunError(
        f"task_archive has no {TASK_FILE}, neither at its top nor one folder below", code="invalid"
    )
