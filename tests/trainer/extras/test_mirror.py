"""Checkpoints are copied to another file system, and only whole copies are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path

import fsspec
import pytest
import shortuuid

from tests.clouds import NO_GCS, NO_S3, amazon, google
from tests.needs import needs
from trainer.checkpoint import FORMAT, CheckpointUploads, Saved
from trainer.errors import CheckpointError, ConfigError
from trainer.extras.mirror import HISTORY, CheckpointMirror
from trainer.run.folder import RunFolder

KILLED = """
import os, signal, sys
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from trainer.checkpoint import Saved
from trainer.extras.mirror import CheckpointMirror
from trainer.run.folder import RunFolder

put, written = LocalFileSystem.put_file, []

def killed(self, local, remote, **options):
    written.append(remote)
    if len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, local, remote, **options)

LocalFileSystem.put_file = killed
folder = RunFolder(Path(sys.argv[2]))
saved = Saved(folder.checkpoints / "step-000002", 2)
CheckpointMirror(sys.argv[1], keep_last=1).upload(saved, folder)
"""


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty folder in memory."""
    url = f"memory://{shortuuid.random(8)}/run-a"
    yield url
    files = fsspec.filesystem("memory")
    files.rm(url.rpartition("/")[0], recursive=True)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("a: 1\n")
    run.metrics.write_text('{"step": 1}\n')
    run.ledger.write_text('{"step": 0}\n')
    return run


def saved_at(folder: RunFolder, step: int) -> Saved:
    path = folder.checkpoints / f"step-{step:06d}"
    (path / "state").mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"step": step, "format": FORMAT}))
    (path / "state" / "__0_0.distcp").write_bytes(bytes([step]) * 1000)
    return Saved(path, step)


def names(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in files.ls(root, detail=False))


def test_copy_continues_the_run_on_an_empty_disk(
    memory: str, folder: RunFolder, tmp_path: Path
) -> None:
    saved = saved_at(folder, 3)
    CheckpointMirror(memory, keep_last=2).upload(saved, folder)
    mirror = CheckpointMirror(memory, keep_last=2)
    copy = mirror.newest()
    assert copy is not None
    assert mirror.history(copy, "config.yaml") == "a: 1\n"
    empty = RunFolder.create(tmp_path / "empty")
    fetched = mirror.fetch(copy, empty)
    assert fetched == Saved(empty.checkpoints / "step-000003", 3)
    for name in ("run.json", "state/__0_0.distcp"):
        assert (fetched.path / name).read_bytes() == (saved.path / name).read_bytes()
    assert sorted(path.name for path in fetched.path.iterdir()) == ["run.json", "state"]
    assert empty.metrics.read_text() == '{"step": 1}\n'
    assert empty.ledger.read_text() == '{"step": 0}\n'
    assert empty.run_id == folder.run_id
    assert not (empty.path / ".mirrored").exists()


def trained(folder: RunFolder, step: int, groups: bytes) -> None:
    """A step of the ledger, with its batch."""
    folder.batches.mkdir(exist_ok=True)
    (folder.batches / f"step-{step:06d}").write_bytes(groups)
    with folder.ledger.open("a") as ledger:
        ledger.write(json.dumps({"step": step, "batch": sha256(groups).hexdigest()}) + "\n")


def test_batches_of_the_ledger_are_copied_once_and_are_those_of_the_copy(
    memory: str, folder: RunFolder, tmp_path: Path
) -> None:
    mirror = CheckpointMirror(memory, keep_last=2)
    files, root = fsspec.core.url_to_fs(memory)
    for step in (1, 2):
        trained(folder, step, b"old %d" % step)
    mirror.upload(saved_at(folder, 2), folder)
    first = f"{root}/batches/step-000001-{sha256(b'old 1').hexdigest()[:16]}"
    written = files.created(first)
    trained(folder, 2, b"new 2")  # the run went back to step 1
    trained(folder, 3, b"new 3")
    (folder.batches / "step-000004").write_bytes(b"its line is not written yet")
    with folder.ledger.open("a") as ledger:
        ledger.write('{"step": 4, "ba')
    mirror.upload(saved_at(folder, 3), folder)
    assert files.created(first) == written
    copy = mirror.newest()
    assert copy is not None
    empty = RunFolder.create(tmp_path / "empty")
    mirror.fetch(copy, empty)
    found = {file.name: file.read_bytes() for file in empty.batches.iterdir()}
    assert found == {
        "step-000001": b"old 1",
        "step-000002": b"new 2",
        "step-000003": b"new 3",
    }
    files.pipe_file(first, b"cu")
    mirror.upload(saved_at(folder, 4), folder)
    assert files.cat_file(first) == b"old 1"


def test_copy_that_cannot_be_fetched_leaves_nothing_on_the_disk(
    memory: str, folder: RunFolder, tmp_path: Path
) -> None:
    mirror = CheckpointMirror(memory, keep_last=2)
    mirror.upload(saved_at(folder, 3), folder)
    copy = mirror.newest()
    assert copy is not None
    files, root = fsspec.core.url_to_fs(memory)
    files.rm(f"{root}/step-000003/state/__0_0.distcp")
    empty = RunFolder.create(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="cannot be read into"):
        mirror.fetch(copy, empty)
    assert not list(empty.checkpoints.iterdir())


def test_copy_whose_batches_cannot_be_fetched_leaves_nothing_on_the_disk(
    memory: str, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = CheckpointMirror(memory, keep_last=2)
    trained(folder, 1, b"groups")
    mirror.upload(saved_at(folder, 1), folder)
    copy = mirror.newest()
    assert copy is not None
    get = mirror._files.get_file

    def away(remote: str, local: str) -> None:
        if "/batches/" in remote:
            raise OSError("away")
        get(remote, local)

    monkeypatch.setattr(mirror._files, "get_file", away)
    empty = RunFolder.create(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="cannot be read into"):
        mirror.fetch(copy, empty)
    assert not list(empty.checkpoints.iterdir())
    assert not (empty.path / ".mirrored").exists()


def test_last_checkpoints_and_the_best_are_kept(memory: str, folder: RunFolder) -> None:
    mirror = CheckpointMirror(memory, keep_last=2)
    for step in (1, 2, 3, 4):
        saved = saved_at(folder, step)
        if step == 1:
            (folder.checkpoints / "best").write_text(saved.path.name)
        mirror.upload(saved, folder)
    kept = [f"step-{step:06d}" for step in (1, 3, 4)]
    assert names(memory) == sorted(["best", *kept, *(f"{name}.json" for name in kept)])


def test_copy_counts_only_with_every_file_in_its_size(memory: str, folder: RunFolder) -> None:
    mirror = CheckpointMirror(memory, keep_last=5)
    for step in (1, 2, 3, 4):
        mirror.upload(saved_at(folder, step), folder)
    files, root = fsspec.core.url_to_fs(memory)
    files.pipe_file(f"{root}/step-000004/state/__0_0.distcp", b"cut")
    files.rm(f"{root}/step-000003/run.json")
    files.pipe_file(f"{root}/step-000002.json", b'{"sizes": {"run.j')
    found = mirror.newest()
    assert found is not None
    assert found.step == 1
    mirror.upload(Saved(folder.checkpoints / "step-000004", 4), folder)
    found = mirror.newest()
    assert found is not None
    assert found.step == 4


def test_upload_that_is_killed_does_not_count_and_is_repeated(
    folder: RunFolder, tmp_path: Path
) -> None:
    url = f"file://{tmp_path / 'mirror'}"
    mirror = CheckpointMirror(url, keep_last=1)
    mirror.upload(saved_at(folder, 1), folder)
    second = saved_at(folder, 2)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, url, str(folder.path)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "mirror" / "step-000002" / "run.json").is_file()
    found = mirror.newest()
    assert found is not None
    assert found.step == 1
    mirror.upload(second, folder)
    assert names(url) == ["step-000002", "step-000002.json"]


def test_copy_that_is_whole_is_not_written_again(memory: str, folder: RunFolder) -> None:
    mirror = CheckpointMirror(memory, keep_last=1)
    saved = saved_at(folder, 1)
    mirror.upload(saved, folder)
    files, root = fsspec.core.url_to_fs(memory)
    written = files.created(f"{root}/step-000001/run.json")
    mirror.upload(saved, folder)
    assert files.created(f"{root}/step-000001/run.json") == written


def test_mirror_of_another_run_is_not_written_to(
    memory: str, folder: RunFolder, tmp_path: Path
) -> None:
    mirror = CheckpointMirror(memory, keep_last=1)
    mirror.upload(saved_at(folder, 1), folder)
    other = RunFolder.create(tmp_path / "other")
    with pytest.raises(CheckpointError, match=rf"of the run {folder.run_id}, and .*/other is the"):
        mirror.upload(saved_at(other, 2), other)
    assert names(memory) == ["step-000001", "step-000001.json"]


async def test_failed_upload_is_a_warning_until_the_end(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    uploads = CheckpointUploads(CheckpointMirror(f"file://{tmp_path}/file", keep_last=1))
    saved, said = saved_at(folder, 1), list[str]()
    uploads.start(saved, folder)
    await uploads.room(said.append)
    assert len(said) == 1
    assert said[0].startswith(
        f"warning: trainer.checkpoint_mirror: file://{tmp_path}/file cannot get a copy of "
        f"{saved.path} ("
    )
    uploads.start(saved, folder)
    with pytest.raises(CheckpointError, match="start the run again"):
        await uploads.finish()
    await uploads.finish()


async def test_upload_reads_its_checkpoint_before_there_is_room_for_the_next(
    memory: str, folder: RunFolder
) -> None:
    uploads = CheckpointUploads(CheckpointMirror(memory, keep_last=1))
    uploads.start(saved_at(folder, 1), folder)
    await uploads.room(pytest.fail)
    assert names(memory) == ["step-000001", "step-000001.json"]


@pytest.mark.parametrize("url", ["nothing://bucket/run", "gs://user:secret@bucket/run"])
def test_url_that_no_file_system_serves_is_one_line_of_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"checkpoint_mirror=\w+://bucket/run: .*; install") as at:
        CheckpointMirror(url, keep_last=1)
    assert "secret" not in str(at.value)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # how gcsfs sends parts
@pytest.mark.parametrize(
    ("server", "none"),
    [
        pytest.param(amazon, r"s3://none/run cannot get .* does not exist", marks=needs(NO_S3)),
        pytest.param(google, r"gs://none/run cannot get .*", marks=needs(NO_GCS)),
    ],
)
def test_copy_on_a_cloud_continues_the_run(
    folder: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Callable[[pytest.MonkeyPatch], AbstractContextManager[str]],
    none: str,
) -> None:
    with server(monkeypatch) as bucket:
        url = f"{bucket}/run-a"
        mirror = CheckpointMirror(url, keep_last=1)
        for step in (1, 2):
            saved = saved_at(folder, step)
            (saved.path / "state" / "large").write_bytes(os.urandom(60_000_000))  # several parts
            mirror.upload(saved, folder)
        assert names(url) == ["step-000002", "step-000002.json"]
        copy = CheckpointMirror(url, keep_last=1).newest()
        assert copy is not None
        fetched = mirror.fetch(copy, RunFolder.create(tmp_path / "empty"))
        for name in copy.sizes.keys() - {f"run/{each}" for each in HISTORY}:
            assert (fetched.path / name).read_bytes() == (saved.path / name).read_bytes()
        files, root = fsspec.core.url_to_fs(url)
        files.rm(f"{root}/step-000002/run.json")
        files.invalidate_cache()
        assert CheckpointMirror(url, keep_last=1).newest() is None
        with pytest.raises(CheckpointError, match=none):
            CheckpointMirror(f"{bucket[:5]}none/run", keep_last=1).upload(saved, folder)
