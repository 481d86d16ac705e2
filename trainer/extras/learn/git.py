"""Reads a Git repository in which an agent has worked.

Invariant: no program runs that the repository names: hooks, filters of text, monitors and external
diffs are off.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TIMEOUT_S = 20.0
_SAFE = (
    *("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "diff.external="),
    *("-c", "core.pager=cat", "-c", "log.showSignature=false", "-c", "protocol.allow=never"),
)
MAX_COMMITS = 1000


@dataclass(frozen=True, slots=True)
class Repository:
    """Example: Repository.of("/home/ann/code/shop").commits(1.78e9, 1.79e9)"""

    root: Path

    @classmethod
    def of(cls, folder: str) -> Self | None:
        """The repository that the folder is in; None: there is none."""
        if not folder or not Path(folder).is_dir():
            return None
        found = _git(Path(folder), "rev-parse", "--show-toplevel")
        return None if found is None else cls(Path(found))

    def commits(self, since: float, until: float) -> list[tuple[str, str]]:
        """Id and subject of the commits whose authors made them in this time (Unix seconds), also
        those that no branch has any more, as long as the reflog knows them."""
        words = ("log", "--reflog", "--all", f"--max-count={MAX_COMMITS}", "--format=%H %at %s")
        lines = (_git(self.root, *words) or "").splitlines()
        found = (line.split(" ", 2) for line in lines if line.count(" ") > 1)
        return [(commit, subject) for commit, at, subject in found if since <= int(at) <= until + 1]

    def keeps(self, commit: str) -> bool:
        """Whether HEAD has the commit, and no later commit says that it reverts it."""
        if _git(self.root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
            return False
        grep = f"--grep=This reverts commit {commit}"
        return not _git(self.root, "log", "--max-count=1", "--format=%H", grep, "HEAD")

    def share(self, path: Path, lines: Sequence[str]) -> float | None:
        """The share of the lines that the file has at HEAD; None: the file is not the repository's.
        A file that HEAD no longer has holds none."""
        try:
            inside = path.resolve().relative_to(self.root.resolve())
        except (ValueError, OSError):
            return None
        if _git(self.root, "rev-parse", "HEAD") is None:
            return None
        text = _git(self.root, "show", "--no-textconv", f"HEAD:{inside.as_posix()}")
        held = {line.strip() for line in (text or "").splitlines()}
        return sum(line in held for line in lines) / len(lines)


def _git(folder: Path, *words: str) -> str | None:
    """What the command prints; None if it fails."""
    try:
        done = subprocess.run(
            ["git", *_SAFE, "-C", str(folder), *words],
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
