"""Any file system that fsspec knows: opening one by its URL, and its errors."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import fsspec

from proxy.errors import ConfigurationError
from proxy.machine.secrecy import without_credentials

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss"}
"""Protocols without folders. s3fs would create a missing bucket instead of a folder."""
_THEIR_ERRORS = {
    "botocore.exceptions": "BotoCoreError",
    "aiohttp": "ClientError",
    "gcsfs.retry": "HttpError",
    "google.auth.exceptions": "GoogleAuthError",
    "azure.core.exceptions": "AzureError",
}
"""Module → its error that file systems raise besides OSError; modules that are not loaded raise
nothing."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A folder of a file system, which may be an object store.

    Example: FileSystem.at("s3://bucket/run-a") has the root "bucket/run-a".
    """

    files: Any
    """An `fsspec.AbstractFileSystem`."""
    root: str
    has_folders: bool

    @classmethod
    def at(cls, url: str) -> FileSystem:
        """
        Raises:
            ConfigurationError: no installed file system serves the URL.
        """
        try:
            files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(
                f"{one_line(error)}; install the package that serves such URLs, for example s3fs "
                "for s3:// (pip install 'agentic-rl[s3]'), or use another URL"
            ) from error
        protocols = files.protocol
        own = {protocols} if isinstance(protocols, str) else set(protocols)
        return cls(files, str(root).rstrip("/"), not own & OBJECT_STORES)

    def make_folder_of(self, path: str) -> None:
        """Makes the folder in which the file `path` lies."""
        if self.has_folders:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)


def file_system_errors() -> tuple[type[Exception], ...]:
    """OSError, and the errors of `_THEIR_ERRORS` whose modules are loaded."""
    loaded: Any = sys.modules
    named = _THEIR_ERRORS.items()
    return OSError, *(getattr(loaded[module], name) for module, name in named if module in loaded)


def one_line(error: BaseException) -> str:
    """The error's message without line breaks and credentials, of at most 300 characters."""
    return without_credentials(" ".join(str(error).split())[:300] or type(error).__name__)
