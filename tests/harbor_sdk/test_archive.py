from __future__ import annotations

import gzip
import io
import tarfile
import time
import tracemalloc
from pathlib import Path

import pytest

from harbor_sdk.archive import pack_task, unpack_task
from harbor_sdk.errors import AgentRunError
from tests.harbor_sdk.harbor_tasks import write_task


def test_unpacking_restores_packed_task(tmp_path: Path) -> None:
    task = write_task(tmp_path / "in", "one")
    archive = tmp_path / "task.tar.gz"
    archive.write_bytes(pack_task(task))
    (tmp_path / "out").mkdir()
    back = unpack_task(archive, tmp_path / "out", max_bytes=10**6)
    names = sorted(path.relative_to(task) for path in task.rglob("*"))
    assert sorted(path.relative_to(back) for path in back.rglob("*")) == names
    assert (back / "tests/test.sh").read_bytes() == (task / "tests/test.sh").read_bytes()


def _archive(path: Path, members: dict[str, bytes], link: tuple[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        if link is not None:
            member = tarfile.TarInfo(link[0])
            member.type, member.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(member)
    return path


@pytest.mark.parametrize("name", ["../evil", "a/../../evil"])
def test_names_outside_the_target_are_refused(tmp_path: Path, name: str) -> None:
    archive = _archive(tmp_path / "a.tar.gz", {"task.toml": b"", name: b"x"})
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(AgentRunError, match=r"not a valid tar\.gz"):
        unpack_task(archive, target, max_bytes=1000)
    assert not list(tmp_path.rglob("evil"))


def test_absolute_name_is_unpacked_inside_the_target(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "a.tar.gz", {"task.toml": b"", "/evil": b"x"})
    (tmp_path / "out").mkdir()
    unpack_task(archive, tmp_path / "out", max_bytes=1000)
    assert (tmp_path / "out/evil").read_bytes() == b"x"
    assert not Path("/evil").exists()


def test_links_to_the_outside_are_refused(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "a.tar.gz", {"task.toml": b""}, link=("passwd", "/etc/passwd"))
    (tmp_path / "out").mkdir()
    with pytest.raises(AgentRunError, match=r"not a valid tar\.gz"):
        unpack_task(archive, tmp_path / "out", max_bytes=1000)


def test_archive_bomb_is_refused_at_the_bound(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "a.tar.gz", {"task.toml": b"", "zeros": bytes(10**6)})
    (tmp_path / "out").mkdir()
    with pytest.raises(AgentRunError, match="more than 1000 bytes") as caught:
        unpack_task(archive, tmp_path / "out", max_bytes=1000)
    assert caught.value.code == "too_large"


def test_same_files_give_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path, "one")
    first = pack_task(task)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert pack_task(task) == first


def _links(path: Path, *members: tuple[str, str, bytes]) -> Path:
    """`(name, link's goal or "", type)`, in that order, and a task.toml."""
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("task.toml"))
        for name, goal, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, goal
            tar.addfile(member)
    return path


FILE, LINK, HARD = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize(
    "members",
    [
        [("up", "..", LINK)],
        [("a", ".", LINK), ("d/b", "../a/../x", LINK)],  # inside by its letters, outside in truth
        [("a", "d", LINK), ("a/file", "", FILE)],
        [("a", "task.toml", LINK), ("b", "a", HARD)],
        [("b", "../task.toml", HARD)],
        [("p", "", tarfile.FIFOTYPE)],
        [("n", "", tarfile.CHRTYPE)],
    ],
)
def test_members_that_could_lead_outside_are_refused(
    tmp_path: Path, members: list[tuple[str, str, bytes]]
) -> None:
    archive = _links(tmp_path / "a.tar.gz", *members)
    (tmp_path / "out").mkdir()
    with pytest.raises(AgentRunError, match=r"not a valid tar\.gz"):
        unpack_task(archive, tmp_path / "out", max_bytes=1000)


def test_links_inside_the_task_are_kept(tmp_path: Path) -> None:
    archive = _links(tmp_path / "a.tar.gz", ("d/b", "../task.toml", LINK), ("c", "d/b", LINK))
    (tmp_path / "out").mkdir()
    unpack_task(archive, tmp_path / "out", max_bytes=1000)
    assert (tmp_path / "out/c").resolve() == (tmp_path / "out/task.toml").resolve()


def test_header_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    """The gzip has a megabyte. Refusing it must not use a gigabyte of memory."""
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 2**30
    archive = tmp_path / "a.tar.gz"
    with gzip.open(archive, "wb", 1) as file:
        file.write(header.tobuf())
        for _ in range(64):
            file.write(bytes(2**20))
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    try:
        with pytest.raises(AgentRunError, match=r"not a valid tar\.gz"):
            unpack_task(archive, tmp_path / "out", max_bytes=2**40)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harbor_sdk.archive.MAX_MEMBERS", 10)
    archive = _links(tmp_path / "a.tar.gz", *((f"f{n}", "", FILE) for n in range(20)))
    (tmp_path / "out").mkdir()
    with pytest.raises(AgentRunError, match="more than 10 files"):
        unpack_task(archive, tmp_path / "out", max_bytes=1000)


def test_incomplete_archive_is_refused(tmp_path: Path) -> None:
    whole = pack_task(write_task(tmp_path / "in", "one"))
    archive = tmp_path / "a.tar.gz"
    for end in (10, len(whole) // 2, len(whole) - 9):
        archive.write_bytes(whole[:end])
        out = tmp_path / f"out{end}"
        out.mkdir()
        with pytest.raises(AgentRunError, match=r"not a valid tar\.gz"):
            unpack_task(archive, out, max_bytes=10**6)


def test_other_files_and_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "text").write_text("hello")
    with pytest.raises(AgentRunError, match=r"not a valid tar\.gz"):
        unpack_task(tmp_path / "text", tmp_path / "out", max_bytes=1000)
    empty = _archive(tmp_path / "a.tar.gz", {"readme": b""})
    with pytest.raises(AgentRunError, match=r"no task\.toml"):
        unpack_task(empty, tmp_path / "out", max_bytes=1000)
    with pytest.raises(AgentRunError, match=r"no task\.toml"):
        pack_task(tmp_path / "out")
