"""Copies of a run's checkpoints at a URL of any file system that fsspec knows.

    s3://bucket/run-a/step-000010/        the checkpoint, as in the run's folder
                     /step-000010/run/    what continues the run on an empty disk: its
                                          configuration, id and summary, and its lines
                     /step-000010.json    names and sizes of all of these files, written last
                     /batches/            of each step in the ledger, the groups that were trained:
                                          step-000009-ab12…, with its hash in the ledger
                     /best                the checkpoint with the best evaluation

Invariant: a copy counts only if its list is there and every file on it has its size. A process that
is killed in the middle of an upload leaves files without a list, which nobody reads and which the
next upload deletes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.errors import ConfigurationError
from proxy.extras.relay.weights.file_system import FileSystem, file_system_errors, one_line
from proxy.machine.secrecy import without_credentials
from trainer.checkpoint import MirroredCheckpoint, Saved
from trainer.errors import CheckpointError, ConfigError
from trainer.run.folder import RunFolder

KEY = "trainer.checkpoint_mirror"
HISTORY = (
    *("run.id", "summary.json", "metrics.jsonl", "phases.jsonl", "trials.jsonl", "ledger.jsonl"),
    "config.yaml",
)
"""Files of the run's folder that a copy has besides the checkpoint. The configuration is fetched
last, because a folder without it is not that of a run."""
BATCHES = "batches"


class CheckpointMirror:
    """Implements `trainer.checkpoint.Mirror`. Example:
    mirror = CheckpointMirror("s3://bucket/run-a", keep_last=2)
    mirror.upload(saved, folder)
    newest = mirror.newest()
    """

    def __init__(self, url: str, *, keep_last: int) -> None:
        """
        Raises:
            ConfigError: no installed file system serves the URL.
        """
        self.url = without_credentials(url).rstrip("/")
        self._keep_last = keep_last
        try:
            self._system = FileSystem.at(url)
        except ConfigurationError as error:
            raise ConfigError(f"{KEY}={self.url}: {error.message}") from error
        self._files, self._root = self._system.files, self._system.root

    def newest(self) -> MirroredCheckpoint | None:
        """The whole copy of the highest step; None if there is none.

        Raises:
            CheckpointError: the file system cannot be read.
        """
        with self._errors("be read"):
            self._files.invalidate_cache()
            whole = (self._whole(step) for step in sorted(self._steps(), reverse=True))
            return next((copy for copy in whole if copy is not None), None)

    def upload(self, saved: Saved, folder: RunFolder) -> None:
        """Copies a finished checkpoint, and deletes the copies that the run no longer keeps. A copy
        that is already whole stays as it is.

        Raises:
            CheckpointError: it could not be copied, or the mirror is another run's; earlier copies
                are unchanged.
        """
        newest = self.newest()
        if newest is not None and newest.run_id != folder.run_id:
            raise CheckpointError(
                f"{KEY}={self.url} has checkpoints of the run {newest.run_id}, and {folder.path} "
                f"is the run {folder.run_id}; give each run its own URL"
            )
        with self._errors(f"get a copy of {saved.path}"):
            if newest is None or newest.step < saved.step:
                self._write(saved, folder)
            best = saved.path.parent / "best"
            if best.is_file():
                self._files.pipe_file(f"{self._root}/best", best.read_bytes())
            self._prune(saved.step)

    def fetch(self, copy: MirroredCheckpoint, folder: RunFolder) -> Saved:
        """Copies a whole checkpoint, and the history of its run, into the folder of a new run.

        Raises:
            CheckpointError: a file could not be read.
        """
        final = folder.checkpoints / f"step-{copy.step:06d}"
        partial = folder.checkpoints / f".step-{copy.step:06d}"
        with self._errors(f"be read into {final}"):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                for name in copy.sizes:
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(f"{self._copy(copy.step)}/{name}", str(partial / name))
                self._fetch_batches(partial / "run" / folder.ledger.name, partial / BATCHES)
            except BaseException:  # the next start takes another folder
                shutil.rmtree(partial, ignore_errors=True)
                raise
            history = folder.path / ".mirrored"
            shutil.rmtree(history, ignore_errors=True)
            (partial / "run").rename(history)
            if (partial / BATCHES).is_dir():
                shutil.rmtree(folder.batches, ignore_errors=True)
                (partial / BATCHES).rename(folder.batches)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for name in HISTORY:
                if (history / name).is_file():
                    (history / name).replace(folder.path / name)
            history.rmdir()
        return Saved(final, copy.step)

    def history(self, copy: MirroredCheckpoint, name: str) -> str:
        """A file of `HISTORY` as it was when the copy was made."""
        with self._errors("be read"):
            text: bytes = self._files.cat_file(f"{self._copy(copy.step)}/run/{name}")
            return text.decode()

    def _write(self, saved: Saved, folder: RunFolder) -> None:
        self._delete(saved.step)
        copy, sizes = self._copy(saved.step), {}
        for file in sorted(each for each in saved.path.rglob("*") if each.is_file()):
            name = str(file.relative_to(saved.path))
            self._system.make_folder_of(f"{copy}/{name}")
            self._files.put_file(str(file), f"{copy}/{name}")
            sizes[name] = file.stat().st_size
        self._system.make_folder_of(f"{copy}/run/")
        # Texts whose size is known, although the run appends to their files meanwhile.
        there = (name for name in HISTORY if (folder.path / name).is_file())
        history = {name: (folder.path / name).read_bytes() for name in there}
        self._write_batches(history.get(folder.ledger.name, b""), folder)
        for name, text in (history | {"run.id": folder.run_id.encode()}).items():
            self._files.pipe_file(f"{copy}/run/{name}", text)
            sizes[f"run/{name}"] = len(text)
        listed = {"run_id": folder.run_id, "sizes": sizes}
        self._files.pipe_file(self._list(saved.step), json.dumps(listed).encode())

    def _write_batches(self, ledger: bytes, folder: RunFolder) -> None:
        """Copies the batches of this ledger that have no copy yet."""
        there = self._mirrored_batches()
        for name, copy in _batches_of(ledger).items():
            file = folder.batches / name
            if file.is_file() and there.get(copy) != file.stat().st_size:
                self._system.make_folder_of(f"{self._root}/{BATCHES}/{copy}")
                self._files.put_file(str(file), f"{self._root}/{BATCHES}/{copy}")

    def _fetch_batches(self, ledger: Path, folder: Path) -> None:
        """Copies those that the fetched ledger names, as far as they were copied, to the folder."""
        there = self._mirrored_batches()
        names = _batches_of(ledger.read_bytes() if ledger.is_file() else b"")
        for name, copy in names.items():
            if copy in there:
                folder.mkdir(exist_ok=True)
                self._files.get_file(f"{self._root}/{BATCHES}/{copy}", str(folder / name))

    def _mirrored_batches(self) -> dict[str, int]:
        """Name of each copy → its size in bytes, which is less if it was cut."""
        place = f"{self._root}/{BATCHES}"
        found = self._files.ls(place, True) if self._files.isdir(place) else []
        return {each["name"].rpartition("/")[2]: each["size"] for each in found}

    def _whole(self, step: int) -> MirroredCheckpoint | None:
        try:
            listed = json.loads(self._files.cat_file(self._list(step)))
        except ValueError:  # the list itself was cut
            return None
        found = self._files.find(self._copy(step), detail=True)
        prefix = len(self._copy(step)) + 1
        there = {name[prefix:]: about["size"] for name, about in found.items()}
        whole = there == listed["sizes"]
        return MirroredCheckpoint(step, listed["run_id"], there) if whole else None

    def _steps(self) -> list[int]:
        """The steps with a list."""
        return [_step(name) for name in self._names() if name.endswith(".json")]

    def _names(self) -> list[str]:
        """Names below the URL that belong to copies: `step-000010` and `step-000010.json`."""
        if not self._files.isdir(self._root):
            return []
        found = [each.rstrip("/").rpartition("/")[2] for each in self._files.ls(self._root, False)]
        return [name for name in found if name.startswith("step-")]

    def _prune(self, newest: int) -> None:
        """Deletes incomplete copies, and complete ones except the newest and the best."""
        self._files.invalidate_cache()
        kept = {newest, *sorted(self._steps())[-self._keep_last :]}
        if self._files.exists(f"{self._root}/best"):
            kept.add(_step(self._files.cat_file(f"{self._root}/best").decode()))
        for step in {_step(name) for name in self._names()} - kept:
            self._delete(step)

    def _delete(self, step: int) -> None:
        """Deletes a copy: its list first, so that it no longer counts."""
        for name in (self._list(step), self._copy(step)):
            if self._files.exists(name):
                self._files.rm(name, recursive=True)

    def _copy(self, step: int) -> str:
        return f"{self._root}/step-{step:06d}"

    def _list(self, step: int) -> str:
        return f"{self._copy(step)}.json"

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raises a CheckpointError if the file system fails: the URL cannot `what`."""
        try:
            yield
        except file_system_errors() as error:
            raise CheckpointError(
                f"{KEY}: {self.url} cannot {what} ({one_line(error)}); check the URL, the "
                "credentials and the free space, then start the run again: it continues from the "
                "newest whole checkpoint"
            ) from error


def _batches_of(ledger: bytes) -> dict[str, str]:
    """File of each batch that the lines name → its copy. A step that was trained again, after the
    run went back, has its last line's."""
    whole = ledger[: ledger.rfind(b"\n") + 1]  # the run may be appending a line
    lines = (json.loads(line) for line in whole.splitlines())
    return {
        (name := f"step-{line['step']:06d}"): f"{name}-{line['batch'][:16]}"
        for line in lines
        if "batch" in line
    }


def _step(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(".json"))
