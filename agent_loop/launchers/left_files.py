"""A copy of what an agent left, for the programs that judge it.

An agent can leave more than its work: links to the judge's own files, pipes that never end, hooks
and settings of the tools that a judge may use. Invariant: in the copy, every link leads to a file
of the working directory or of the system; there is nothing but files and folders; a Git repository
has no hooks and no settings that name programs; and files that configure test runners and package
managers by their mere presence (CONFIGURATION) are those that the trial began with, or none. A
judge that executes files of the working directory still executes what the agent wrote.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent_loop.errors import RewardError
from proxy.wall import SYSTEM

CONFIGURATION = frozenset(
    [
        *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini"),
        *("sitecustomize.py", "usercustomize.py"),
        *(".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.cjs", ".pnp.cjs", ".pnp.loader.mjs"),
        *(f".mocharc.{kind}" for kind in ("js", "cjs", "json", "jsonc", "yaml", "yml")),
        *("bunfig.toml", ".coveragerc", ".pdbrc", ".rspec", ".gdbinit"),
        *(".cargo/config", ".cargo/config.toml"),
    ]
)
"""Names of files that pytest, Python, npm and the like read because they are there. They are
settings, never the work."""
COMPILED = "__pycache__"
"""Folders of compiled modules, which Python takes in place of a source that a judge copies there:
a file of them can forbid it to compare."""
TEST_CONFIGURATION = frozenset({"pyproject.toml", "setup.cfg"})
"""Also settings of pytest. They may be the work, so only for a judge that runs pytest."""
_FULL = ("No space left on device", "Disk quota exceeded")
_PATH_BYTES = 3500
"""Length of a path from which on a folder is not copied: system calls accept 4,095 bytes."""
_GIT_KEYS = {
    "core": (
        "repositoryformatversion filemode bare logallrefupdates symlinks ignorecase autocrlf eol"
    ),
    "remote": "url fetch",
    "branch": "remote merge",
    "user": "name email",
    "extensions": "objectformat",
}
"""The settings of a repository that stay: none of them names a program or another file."""
_GIT_SECTION = re.compile(r'^\s*\[([a-z]+)(?: "[^"\\]*")?\]\s*$', re.IGNORECASE)
_GIT_VALUE = re.compile(r"^\s*([a-z]+)\s*=[^\\]*$", re.IGNORECASE)


def keep_configuration(workspace: Path, kept: Path) -> None:
    """Copies the files of a new working directory that configure tools to `kept`."""
    for path in _walk(workspace):
        if _is_one_of(path, CONFIGURATION | TEST_CONFIGURATION) and path.is_file():
            copy = kept / path.relative_to(workspace)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy, follow_symlinks=True)


def copy_left(workspace: Path, seen_at: Path, kept: Path, to: Path, *, tests: bool) -> None:
    """Copies the working directory to `to`, which does not exist.

    Args:
        seen_at: the path at which the agent saw it, which its links may name.
        kept: the files that `keep_configuration` copied.
        tests: whether the judge runs pytest.

    Raises:
        RewardError: the disk is full, or a file cannot be read.
    """
    copied = subprocess.run(
        ["cp", "-a", "--", str(workspace), str(to)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    # What the agent made unreadable is left out. A disk that is full is not its doing; a name with
    # these words is.
    full = any(line.endswith(_FULL) for line in copied.stderr.splitlines())
    if copied.returncode != 0 and (full or not to.is_dir()):
        reason = copied.stderr.strip().splitlines()[-1:]
        raise RewardError(f"what the agent left cannot be copied: {''.join(reason)}")
    names = CONFIGURATION | (TEST_CONFIGURATION if tests else frozenset())
    _open(to)
    if _is_repository(to):
        _clean_repository(to)
    for path in _walk(to, opens=True):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            if path.name == COMPILED:
                remove_folder(path)
            elif _is_repository(path):
                _clean_repository(path)
            continue
        is_link = stat.S_ISLNK(mode)
        stays = stat.S_ISREG(mode) or (is_link and _leads_inside(path, to, (workspace, seen_at)))
        if path.name == ".git" and not os.path.isdir(path):
            stays = False
        if path.name in (COMPILED, ".cargo") and is_link:
            stays = False
        if not stays or _is_one_of(path, names):  # a link is as good as a file
            path.unlink()
        elif not is_link and mode & (stat.S_ISUID | stat.S_ISGID):
            path.chmod(stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))
    inside = to.resolve()
    for file in _walk(kept) if kept.is_dir() else ():
        if _is_one_of(file, names) and file.is_file():
            place = to / file.relative_to(kept)
            # A folder on the way may be a link now, and lead out of the copy.
            is_inside = place.parent.is_dir() and place.parent.resolve().is_relative_to(inside)
            if is_inside and not os.path.lexists(place):
                shutil.copy2(file, place)


def _is_one_of(path: Path, names: frozenset[str]) -> bool:
    return path.name in names or f"{path.parent.name}/{path.name}" in names


def remove_folder(folder: Path) -> None:
    """Removes what it can, and ignores errors. An agent can nest folders deeper than Python
    recurses, for example by copying a folder into itself."""
    try:
        shutil.rmtree(folder, onerror=_remove_opened)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder.absolute())], stderr=subprocess.DEVNULL)


def _remove_opened(remove: Callable[..., Any], path: str, _error: Any) -> None:
    """Once more, with the rights to what an agent has locked; what then fails is left."""
    with contextlib.suppress(OSError):
        _open(Path(path).parent)
        _open(Path(path))
        if remove in (os.unlink, os.rmdir):
            remove(path)
        else:  # it could not be read
            shutil.rmtree(path, ignore_errors=True)


def _open(folder: Path) -> None:
    """Gives its owner all rights to a folder."""
    with contextlib.suppress(OSError):
        mode = folder.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:
            folder.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def _walk(folder: Path, *, opens: bool = False) -> Iterator[Path]:
    """Everything below a folder, a folder before what is in it. Links are not followed; a folder
    whose path is too long for the kernel is removed. `opens`: folders are made readable."""
    pending = [folder]
    while pending:
        current = pending.pop()
        if len(os.fsencode(current)) > _PATH_BYTES:
            remove_folder(current)
            continue
        for entry in sorted(os.scandir(current), key=lambda each: each.name):
            path = Path(entry.path)
            if opens:
                _open(path)
            yield path
            if entry.is_dir(follow_symlinks=False) and path.is_dir():
                pending.append(path)


def _leads_inside(link: Path, folder: Path, own_paths: tuple[Path, ...]) -> bool:
    """Whether a link leads to a place in `folder`, or to the system. One that goes up after it has
    gone down does not: what it goes down through could be a link, too."""
    text = os.readlink(link)
    parts = [part for part in text.split("/") if part not in ("", ".")]
    rising = next((n for n, part in enumerate(parts) if part != ".."), len(parts))
    if ".." in parts[rising:]:
        return False
    if not text.startswith("/"):
        place = Path(os.path.normpath(link.parent.joinpath(*parts)))
        return place.is_relative_to(folder)
    if rising:
        return False
    place = Path("/", *parts)
    system = any(place.is_relative_to(each) for each in SYSTEM)
    return system or any(place.is_relative_to(each) for each in own_paths)


def _is_repository(folder: Path) -> bool:
    """Whether Git may take the folder for a repository. Its HEAD may be a link to nowhere."""
    if folder.name == ".git":
        return True
    parts = (os.path.lexists(folder / name) for name in ("objects", "refs", "commondir"))
    return os.path.lexists(folder / "HEAD") and any(parts)


def _clean_repository(folder: Path) -> None:
    """Removes the hooks of a Git repository, and the settings that could name a program, also in
    another folder (`commondir`)."""
    for name in ("hooks", "config.worktree", "commondir"):
        if os.path.isdir(folder / name) and not os.path.islink(folder / name):
            remove_folder(folder / name)
        elif os.path.lexists(folder / name):
            (folder / name).unlink()
    settings = folder / "config"
    if settings.is_symlink():
        settings.unlink()
    if settings.is_file():
        kept, section = [], ""
        for line in settings.read_text(encoding="utf-8", errors="replace").splitlines():
            if found := _GIT_SECTION.match(line):
                section = found[1].lower()
                if section in _GIT_KEYS:
                    kept.append(line)
            elif (found := _GIT_VALUE.match(line)) and found[1].lower() in _GIT_KEYS.get(
                section, ""
            ).split():
                kept.append(line)
        settings.write_text("\n".join([*kept, ""]), encoding="utf-8")
