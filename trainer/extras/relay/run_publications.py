"""The folder of a run at a URL at which versions are published: names, files, and their removal.

Invariants: a version counts from its manifest on, which is written last: a process that is killed
in between leaves files that no reader finds and that the next version deletes. Versions are in the
order of the times in their names, whatever the clocks show where the run is continued.
The last KEPT_FULL full versions are kept, with the deltas after them.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import msgspec

from proxy.errors import ConfigurationError
from proxy.extras.relay.weights.file_system import FileSystem, file_system_errors, one_line
from proxy.extras.relay.weights.publication import (
    ADAPTER_FILE,
    MANIFEST,
    File,
    Manifest,
    encode_manifest,
)
from proxy.machine.secrecy import without_credentials
from trainer.errors import ConfigError, WeightSyncError

KEY = "engine.publish"
KEPT_FULL = 2
"""Number of full versions that are kept. A reader of the older one still finds all of its files."""
_VERSION = re.compile(r"v[0-9]{6,10}-[0-9a-f]{12}")
_log = logging.getLogger(__name__)
FIRST_FULL = "full-00000.safetensors"


class RunPublications:
    """Example:
    run = RunPublications("s3://bucket/weights", "run-a")
    with run.writing(name := run.new_name(12)):
        file = run.upload(name, "full-00000.safetensors")
        ...
        run.commit(manifest)
    """

    def __init__(self, url: str, run: str, model: str | None = None) -> None:
        """`run` names the run's folder at the URL. `model`: the digest of the architecture.

        Raises:
            ConfigError: no installed file system serves the URL.
        """
        self.url = without_credentials(url).rstrip("/")
        try:
            self._system = FileSystem.at(url)
        except ConfigurationError as error:
            raise ConfigError(f"{KEY}={self.url}: {error.message}") from error
        self._run = run
        self._model = model
        self._last_ms: int | None = None
        self._before = set[str]()
        """Folders of the run's publications when this process began."""
        self._ours = set[str]()

    @contextmanager
    def writing(self, version: int) -> Iterator[str]:
        """Yields the name of a new publication, later than all others of the run.

        Raises:
            WeightSyncError: it could not be written; earlier ones are unchanged.
        """
        name = f"{self._run}/v{version:06d}"
        try:
            if self._last_ms is None:
                self._before = set(self._found())
                self._last_ms = max(map(_time_ms, self._before), default=0)
            self._last_ms = max(self._last_ms + 1, time.time_ns() // 1_000_000)
            name = f"{name}-{self._last_ms:012x}"
            self._ours.add(name.rpartition("/")[2])
            yield name
        except file_system_errors() as error:
            raise WeightSyncError(
                f"{KEY}: {self.url} cannot get the weights {name} ({one_line(error)}); check the "
                f"URL, the credentials, and the free space there and in trainer.run_dir, then "
                "start the run again: it continues from its last checkpoint"
            ) from error

    def upload(self, name: str, file: str) -> Upload:
        """Begins a file of a publication."""
        return Upload(self._system, self._path(name, file))

    def commit(self, manifest: Manifest, kept: str | None = None) -> None:
        """Makes the publication count, and deletes old ones, but not the one that is `kept`.

        Raises:
            WeightSyncError: another process publishes the same run.
        """
        manifest = msgspec.structs.replace(manifest, model=self._model)
        path = self._path(manifest.name, MANIFEST)
        self._system.make_folder_of(path)
        self._system.files.pipe_file(path, encode_manifest(manifest))
        try:
            self._prune(manifest.name, kept)
        except file_system_errors() as error:  # as where this key may write and not delete
            _log.warning(
                "%s: old versions could not be deleted from %s (%s)", KEY, self.url, one_line(error)
            )

    def _found(self) -> dict[str, set[str]]:
        """Folder of a publication → its files. What else is in the run's folder is not ours."""
        files, root = self._system.files, self._path(self._run)
        files.invalidate_cache()
        found = dict[str, set[str]]()
        for path in files.find(root):
            version, _, file = str(path)[len(root) + 1 :].rpartition("/")
            if _VERSION.fullmatch(version):
                found.setdefault(version, set()).add(file)
        return found

    def _prune(self, newest: str, kept: str | None) -> None:
        """Deletes versions before the oldest full one that is kept, and incomplete ones."""
        files, root, found = self._system.files, self._path(self._run), self._found()
        if foreign := found.keys() - self._before - self._ours:
            raise WeightSyncError(
                f"{KEY}: another process publishes the run {self._run} at {self.url} "
                f"({max(foreign)}); end one of them"
            )
        stay = {each.rpartition("/")[2] for each in (newest, kept) if each is not None}
        whole = sorted(
            (each for each in found if MANIFEST in found[each]),
            key=lambda each: each.rpartition("-")[2],
        )
        counted = [each for each in whole if kept is None or each != kept.rpartition("/")[2]]
        full = [each for each in counted if found[each] & {FIRST_FULL, ADAPTER_FILE}]
        if full:
            stay |= set(counted[counted.index(full[-KEPT_FULL:][0]) :])
        for each in found.keys() - stay:
            if MANIFEST in found[each]:  # first, so that the version no longer counts
                files.rm(f"{root}/{each}/{MANIFEST}")
            if others := [f"{root}/{each}/{file}" for file in found[each] - {MANIFEST}]:
                files.rm(others)
            if self._system.has_folders:
                with suppress(OSError):  # something else is in it
                    files.rmdir(f"{root}/{each}")

    def _path(self, *names: str) -> str:
        return "/".join([self._system.root, *names])


class Upload:
    """A file of a publication, written in one pass."""

    def __init__(self, system: FileSystem, path: str) -> None:
        system.make_folder_of(path)
        self._name = path.rpartition("/")[2]
        self._file: IO[bytes] | Any = system.files.open(path, "wb")
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def write(self, content: bytes | memoryview) -> None:
        self._digest.update(content)
        self._file.write(content)
        self.size_bytes += len(content)

    def finish(self) -> File:
        self._file.close()
        return File(self._name, self.size_bytes, self._digest.hexdigest())

    def discard(self) -> None:
        """Ends an upload that is not finished; a later version deletes what is there of it."""
        if not self._file.closed:
            with suppress(*file_system_errors()):
                self._file.close()


def _time_ms(version: str) -> int:
    """The time in the name of a publication's folder."""
    return int(version.rpartition("-")[2], 16)
