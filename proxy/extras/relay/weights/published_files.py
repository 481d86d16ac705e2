"""Reads the manifests and files of publications, and checks every byte.

Invariant: a file that `fetch` has copied has the SHA-256 of its manifest. Only names that a
manifest may contain (`publication.py`) are read, below the URL.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from proxy.extras.relay.weights.file_system import FileSystem, file_system_errors, one_line
from proxy.extras.relay.weights.publication import (
    MANIFEST,
    BadPublicationError,
    File,
    Manifest,
    decode_manifest,
)

BLOCK_BYTES = 8 << 20
"""Size of a read; between two, a pull can be stopped."""
MANIFEST_BYTES = 256 << 20
"""Largest manifest: a million pieces have about 50 MB."""
READ_AHEAD = 4
"""Number of blocks of a file that are requested at a time, because each request waits for the
server: with 50 ms of latency 8 MiB at a time are at most 160 MB/s."""


class PullError(Exception):
    """The weights could not be pulled; the message says what to do."""


class PullStopped(Exception):
    """`stopped` returned True: a newer version is wanted, or the worker ends."""


class PublishedFiles:
    """Example: manifest = PublishedFiles("s3://bucket/weights", folder).manifest(name)"""

    def __init__(self, url: str, folder: Path) -> None:
        """`folder` is where the files are copied to.

        Raises:
            ConfigurationError: no installed file system serves the URL.
        """
        self.url = url
        self._system = FileSystem.at(url)
        self._folder = folder
        self._stopped: Callable[[], bool] = lambda: False
        self.pulled_bytes = 0
        """Number of bytes that were read since `pulling` was entered."""

    @contextmanager
    def pulling(self, name: str, stopped: Callable[[], bool]) -> Iterator[None]:
        """A context in which a version is pulled, until `stopped` returns True.

        Raises:
            PullError: a file system fails, or has other bytes than were published.
        """
        self._stopped, self.pulled_bytes = stopped, 0
        with self._errors(name):
            self._folder.mkdir(parents=True, exist_ok=True)
            yield

    def check_stopped(self) -> None:
        if self._stopped():
            raise PullStopped

    def manifest(self, name: str) -> Manifest:
        """Raises BadPublicationError, or an error of the file system."""
        path = f"{self._system.root}/{name}/{MANIFEST}"
        self._system.files.invalidate_cache()
        data = self._system.files.cat_file(path, start=0, end=MANIFEST_BYTES + 1)
        if len(data) > MANIFEST_BYTES:
            raise BadPublicationError(f"{name}/{MANIFEST} has more than {MANIFEST_BYTES >> 20} MiB")
        return decode_manifest(data, name)

    def fetch(self, path: str, about: File, copy: IO[bytes]) -> None:
        """Copies a file of the URL. Raises BadPublicationError: it has other bytes."""
        room = shutil.disk_usage(self._folder).free
        if about.size_bytes > room:
            needed = about.size_bytes >> 20
            raise OSError(28, f"{needed} MiB are needed and {room >> 20} MiB are free")
        digest, size = hashlib.sha256(), 0
        with closing(self._blocks(f"{self._system.root}/{path}", about.size_bytes)) as blocks:
            for block in blocks:
                self.check_stopped()
                digest.update(block)
                copy.write(block)
                size += len(block)
        copy.flush()
        self.pulled_bytes += size
        if size != about.size_bytes:
            raise BadPublicationError(
                f"{path} has {size} bytes, its manifest says {about.size_bytes}"
            )
        if digest.hexdigest() != about.sha256:
            raise BadPublicationError(f"{path} is corrupted: its SHA-256 is not its manifest's")

    def _blocks(self, path: str, size_bytes: int) -> Generator[bytes]:
        """The file's content in order, of which READ_AHEAD blocks are requested at a time. A file
        of another size, and one of a server that knows no ranges, is read from beginning to end."""
        starts, asked = iter(range(0, size_bytes, BLOCK_BYTES)), deque[Future[bytes]]()
        read, ahead = 0, 1  # until the server has shown that it knows ranges
        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="pull") as pool:
            try:
                while True:
                    for start in islice(starts, ahead - len(asked)):
                        asked.append(pool.submit(self._range, path, start, size_bytes))
                    if not asked:
                        break
                    try:
                        block = asked.popleft().result()
                    except ValueError:  # of fsspec, from an HTTP server that knows no ranges
                        break
                    if len(block) != min(BLOCK_BYTES, size_bytes - read):
                        break
                    read, ahead = read + len(block), READ_AHEAD
                    yield block
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        if read < size_bytes or size_bytes == 0:
            with self._system.files.open(path, "rb", block_size=0, cache_type="none") as source:
                source.read(read)
                while block := source.read(BLOCK_BYTES):
                    yield block

    def _range(self, path: str, start: int, size_bytes: int) -> bytes:
        end = min(start + BLOCK_BYTES, size_bytes)
        content: bytes = self._system.files.cat_file(path, start=start, end=end)
        return content

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise PullError(
                f"{self.url} does not have the published weights {name} ({one_line(error)}); give "
                "the worker as --weights-url the URL at which this machine reaches the trainer's "
                "engine.publish"
            ) from error
        except BadPublicationError as error:
            raise PullError(
                f"{self.url}: {one_line(error)}; it is pulled again, and the next version does not "
                "depend on it after at most engine.publish_full_every versions"
            ) from error
        except file_system_errors() as error:
            raise PullError(
                f"the weights {name} could not be pulled from {self.url} to {self._folder} "
                f"({one_line(error)}); check the URL, the worker's credentials for it, the network "
                f"and the free space, which must be twice the size of the weights"
            ) from error
