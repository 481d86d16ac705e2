"""A key that a server creates at its first start and keeps in a file.

Invariant: the file has mode 0600 and is written atomically; servers that start concurrently get the
same key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from proxy.key_file import lines

KEY_BYTES = 32


def kept_key(path: Path) -> str:
    """The first key in the file, which is created if it does not exist; empty if the file is.

    Raises:
        OSError: the file cannot be created or read.
    """
    if not path.exists():
        _make(path)
    return next(iter(lines(path)), "")


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(
        os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(secrets.token_urlsafe(KEY_BYTES) + "\n")
    try:
        with contextlib.suppress(FileExistsError):  # another server was first
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
