"""LoRA adapters that were pulled, each in a folder from which vLLM loads it.

    FOLDER/adapters/policy@12.3fa9c2…/adapter_model.safetensors, adapter_config.json

Invariant: when `make` returns, the folder has the bytes that were published. The newest
KEPT_VERSIONS folders are kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from proxy.engines.segment_layout import new_digest
from proxy.extras.relay.weights.publication import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    Adapter,
    BadPublicationError,
    File,
    Manifest,
)
from proxy.extras.relay.weights.published_files import PublishedFiles
from proxy.routing.policies import KEPT_VERSIONS, LOADED_VERSIONS


def adapter_digest(sha256: str, config: str) -> str:
    """The digest of a publication of an adapter."""
    total = new_digest()
    total.update(f"{sha256} {config}".encode())
    return total.hexdigest()


class AdapterFolders:
    """Example: path = AdapterFolders(files, folder).make(manifest, manifest.adapter)"""

    def __init__(self, files: PublishedFiles, folder: Path) -> None:
        self._files = files
        self._folder = folder.absolute() / "adapters"

    def make(self, manifest: Manifest, adapter: Adapter) -> Path:
        """The adapter's folder, which is pulled unless it is here.

        Raises:
            BadPublicationError: what is published is not what its manifest says.
        """
        assert manifest.full is not None
        (about,) = manifest.full.files
        if adapter_digest(about.sha256, adapter.config) != manifest.digest:
            raise BadPublicationError(f"{manifest.name}: its configuration was changed")
        folder = self._folder / adapter.name
        if not _holds(folder, about, adapter):
            self._pull(f"{manifest.name}/{about.name}", about, adapter, folder)
        os.utime(folder)  # the newest is the one that was wanted last
        self._keep()
        return folder

    def newest(self, adapter: Adapter) -> list[str]:
        """The names of the policy's adapters that engines may still serve."""
        found = [each.name for each in self._by_age() if each.name.startswith(f"{adapter.policy}@")]
        return found[-LOADED_VERSIONS:]

    def forget(self, adapter: Adapter) -> None:
        """Deletes the adapter's folder."""
        shutil.rmtree(self._folder / adapter.name, ignore_errors=True)

    def _pull(self, path: str, about: File, adapter: Adapter, folder: Path) -> None:
        partial = self._folder / ".pulling"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        partial.mkdir(parents=True)
        with (partial / ADAPTER_FILE).open("wb") as copy:
            self._files.fetch(path, about, copy)
        (partial / ADAPTER_CONFIG).write_text(adapter.config, encoding="utf-8")
        partial.rename(folder)

    def _keep(self) -> None:
        for folder in self._by_age()[:-KEPT_VERSIONS]:
            shutil.rmtree(folder)

    def _by_age(self) -> list[Path]:
        return sorted(self._folder.glob("*@*"), key=lambda each: each.stat().st_mtime_ns)


def _holds(folder: Path, about: File, adapter: Adapter) -> bool:
    """Whether the folder has these bytes."""
    try:
        with (folder / ADAPTER_FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return (
            digest == about.sha256
            and (folder / ADAPTER_CONFIG).read_text(encoding="utf-8") == adapter.config
        )
    except OSError:
        return False
