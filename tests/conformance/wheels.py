"""The Python files of official wheels, from the package index, without installing anything.

`uv` chooses the wheels, so that its settings (index, certificates) count. Of each wheel only Python
files, stubs and metadata are read, by HTTP range requests where the index supports them: torch and
vLLM have 500 MB of libraries each. What was fetched stays in its folder, one for each version.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PACKAGES: tuple[str, ...] = ("vllm", "torch", "transformers", "ray", "peft", "trl", "verl", "skyrl")
PACKAGES += ("harbor", "verifiers", "openenv", "renderers")
PLATFORM = ("--python-platform", "x86_64-manylinux_2_28", "--python-version", "3.12")
"""Python 3.12, because Harbor needs it."""
RESOLVE_S = 120
"""An index that does not answer ends the run with an error."""
CONTENTS = "CONTENTS.txt"
"""The names of all files of the wheel; written last, so that it marks a complete folder."""
GAP_BYTES = 1 << 18
"""Files with less than this between them are read by one request."""
TAIL_BYTES = 1 << 20
"""Read first: the wheel's list of files is at its end."""


def pinned() -> dict[str, str]:
    """The versions that this project installs: of its images, or of `benchmarks.install`."""
    sources = (
        "docker/trainer-cuda.lock",
        "docker/harbor.lock",
        "pyproject.toml",
        "benchmarks/install.py",
    )
    texts = [(ROOT / name).read_text("utf-8") for name in sources]
    found = {}
    for package in PACKAGES:
        matches = (re.search(rf"(?<![\w-]){package}==([\w.]+)", text) for text in texts)
        found[package] = next(match[1] for match in matches if match)
    return found


def fetch(cache: Path, versions: Mapping[str, str | None]) -> dict[str, Path]:
    """The folder `NAME-VERSION` of each package's Python files; None means the newest version."""
    kept = {n: cache / f"{n}-{v}" for n, v in versions.items() if v is not None}
    folders = {n: folder for n, folder in kept.items() if (folder / CONTENTS).is_file()}
    wanted = [n if v is None else f"{n}=={v}" for n, v in versions.items() if n not in folders]
    wheels = _wheels(wanted) if wanted else []
    with ThreadPoolExecutor(4) as threads:
        jobs = [(name, threads.submit(_extract, cache, name, *rest)) for name, *rest in wheels]
        return folders | {name: job.result() for name, job in jobs}


def _wheels(wanted: list[str]) -> list[tuple[str, str, str]]:
    """Name, version and address of the wheel of each requirement."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--no-deps", *PLATFORM]
    command += ["--no-config", "--format", "pylock.toml", "-"]
    resolved = subprocess.run(
        command,
        input="\n".join(wanted),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=RESOLVE_S,
    )
    if resolved.returncode:
        raise RuntimeError(f"uv: {resolved.stderr}")
    packages = tomllib.loads(resolved.stdout)["packages"]
    return [(each["name"], each["version"], each["wheels"][0]["url"]) for each in packages]


def _extract(cache: Path, name: str, version: str, url: str) -> Path:
    folder = cache / f"{name}-{version}"
    if (folder / CONTENTS).is_file():
        return folder
    unfinished = cache / f"{name}-{version}.{os.getpid()}"
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        _read(client, url, unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder


def _read(client: httpx.Client, url: str, folder: Path) -> None:
    tail = client.get(url, headers={"Range": f"bytes=-{TAIL_BYTES}"}).raise_for_status()
    size = int(tail.headers.get("Content-Range", f"/{len(tail.content)}").rpartition("/")[2])
    file = _Sparse(size)
    file.put(size - len(tail.content), tail.content)
    start = _directory_start(tail.content)
    if start < size - len(tail.content):
        file.put(start, _range(client, url, start, size))
    with zipfile.ZipFile(file) as archive:
        infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
        ends = [info.header_offset for info in infos[1:]] + [start]
        read = [(i, end) for i, end in zip(infos, ends, strict=True) if _is_read(i.filename)]
        for first, last in _spans([(info.header_offset, end) for info, end in read]):
            if not file.has(first, last):
                file.put(first, _range(client, url, first, last))
        for info, _ in read:
            archive.extract(info, folder)
        folder.joinpath(CONTENTS).write_text("\n".join(i.filename for i in infos), "utf-8")


def _directory_start(tail: bytes) -> int:
    """The offset of a zip file's list of files, from the record at its end."""
    record = tail.rindex(b"PK\x05\x06")
    return int.from_bytes(tail[record + 16 : record + 20], "little")


def _range(client: httpx.Client, url: str, start: int, end: int) -> bytes:
    answer = client.get(url, headers={"Range": f"bytes={start}-{end - 1}"}).raise_for_status()
    return answer.content if answer.status_code == 206 else answer.content[start:end]


def _is_read(name: str) -> bool:
    return name.endswith((".py", ".pyi", ".dist-info/METADATA", ".dist-info/entry_points.txt"))


def _spans(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for start, end in parts:
        if spans and start - spans[-1][1] < GAP_BYTES:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


class _Sparse(io.RawIOBase):
    """A file of which only some parts are there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0
        self._parts: list[tuple[int, bytes]] = []

    def put(self, start: int, content: bytes) -> None:
        self._parts.append((start, content))

    def has(self, start: int, end: int) -> bool:
        return any(at <= start and end <= at + len(part) for at, part in self._parts)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = self._size - self._at if size < 0 else min(size, self._size - self._at)
        for start, part in self._parts:
            if start <= self._at and self._at + size <= start + len(part):
                found = part[self._at - start : self._at - start + size]
                self._at += size
                return found
        raise OSError(f"bytes {self._at} to {self._at + size} were not read")
