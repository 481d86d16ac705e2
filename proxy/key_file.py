"""Keys in a file, one per line.

A changed file is read again at the next use, so keys are replaced without a restart: write the new
key above the old one, give the new one to all callers, and remove the old one. Invariant: while the
file cannot be read, is not a text or has no key, the keys that were read last stay valid.
"""

from __future__ import annotations

import contextlib
import hmac
import os
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
