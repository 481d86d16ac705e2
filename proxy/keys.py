"""Keys in files: those that people give, one per line, and those that a server makes and keeps.

A changed file is read again at the next use, so keys are replaced without a restart: write the new
key above the old one, give the new one to all callers, and remove the old one. Invariants: while a
file cannot be read, is not a text or has no key, the keys that were read last stay valid; the file
of a kept key has mode 0600 and is written atomically, so that servers that start at the same time
get the same key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Iterable
from pathlib import Path


class KeyFile:
    """Example: KeyFile(Path("/run/secrets/admin-key")).accepts("a-key")"""

    def __init__(self, path: Path, keys: Iterable[str] = ()) -> None:
        """`keys` are valid until the file is read."""
        self._path = path
        self._keys = [key.encode() for key in keys]
        self._read_at: tuple[int, int, int] | None = None

    def accepts(self, given: str) -> bool:
        """Whether `given` is one of the keys."""
        return is_one_of(given, self.current())

    def current(self) -> list[bytes]:
        """The keys that are valid now."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self._read_again()
        return self._keys

    def _read_again(self) -> None:
        found = os.stat(self._path)
        state = (found.st_mtime_ns, found.st_ino, found.st_size)
        if state != self._read_at:
            self._keys = [key.encode() for key in lines(self._path)] or self._keys
            self._read_at = state


def lines(path: Path) -> list[str]:
    """The keys in the file, of which programs use the first.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: the file is not a text in UTF-8.
    """
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def is_one_of(given: str, keys: Iterable[bytes]) -> bool:
    """Compares with every key in constant time."""
    encoded = given.encode("utf-8", "surrogatepass")
    return sum(hmac.compare_digest(encoded, key) for key in keys if key) > 0


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
