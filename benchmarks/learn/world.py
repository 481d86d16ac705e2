"""The repository of the simulated users, their tasks, and what each of them secretly prefers.

A task changes a file of a Git repository and commits the change. It can be done in several ways,
which are all correct; a user likes one of them, and never says so in the task. The model of this
benchmark does each preferred thing in about one of five sessions.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("apple", "bread", "cherry", "dates", "grape", "honey", "lemon", "melon")
TARGETS = ("amber", "brass", "coral", "ebony", "ivory", "jade", "pearl", "silver")
CHANGES = "changes.txt"
"""The file in which one of the users wants a line for each change."""
STYLES: Mapping[str, tuple[str, float]] = {
    "plain": ("{Verb} {source}", 0.5),
    "past": ("{source} was changed", 0.3),
    "conventional": ("chore: {verb} {source}", 0.2),
}
"""Style of a commit's message → its form, and the share of it at the start."""
GIT_TOOL = 0.2
"""Share of sessions in which the file is changed by Git itself."""
NOTES_CHANGE = 0.2
"""Share of sessions that write a line into CHANGES."""
PREFERENCES = ("conventional", "git_tool", "changes")


@dataclass(frozen=True, slots=True)
class Job:
    """Example: Job("rename", "apple", "amber")"""

    verb: str
    source: str
    target: str

    @property
    def prompt(self) -> str:
        what = f"{self.source}.txt" + (f" to {self.target}.txt" if self.verb == "rename" else "")
        return f"{self.verb.capitalize()} {what}, and commit the change"

    def change(self, *, git: bool) -> str:
        files = f"{self.source}.txt" + (f" {self.target}.txt" if self.verb == "rename" else "")
        program = {"rename": "mv", "remove": "rm"}[self.verb]
        quiet = " -q" if program == "rm" else ""
        return f"git {program}{quiet} {files}" if git else f"{program} {files}"

    def note(self) -> str:
        return f'echo "{self.verb} {self.source}" >> {CHANGES}'

    def commit(self, style: str) -> str:
        message = STYLES[style][0].format(
            verb=self.verb, Verb=self.verb.capitalize(), source=self.source
        )
        return f'git add -A && git commit -qm "{message}"'


def new_job(rng: random.Random) -> Job:
    return Job(rng.choice(("rename", "remove")), rng.choice(SOURCES), rng.choice(TARGETS))


def new_repository(folder: Path) -> None:
    """A repository with the files of the tasks and one commit: a copy of the first."""
    first = folder.parent / "first"
    if not first.exists():
        _make_repository(first)
    shutil.copytree(first, folder)


def _make_repository(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(SOURCES):
        (folder / f"{name}.txt").write_text(f"{number}\n", encoding="utf-8")
    (folder / CHANGES).write_text("", encoding="utf-8")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "user.name", "user")
    git(folder, "config", "user.email", "user@localhost")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Begin")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout.strip()


def commits(folder: Path) -> int:
    return int(git(folder, "rev-list", "--count", "HEAD"))


def revert(folder: Path) -> None:
    """Takes back the last commit by another one."""
    git(folder, "revert", "--no-edit", "HEAD")


def is_done(folder: Path, job: Job) -> bool:
    """Whether the task is committed, in whatever way."""
    files = set(git(folder, "ls-tree", "--name-only", "HEAD").splitlines())
    gone = f"{job.source}.txt" not in files
    return gone and (job.verb == "remove" or f"{job.target}.txt" in files)


def is_preferred(folder: Path, job: Job, preference: str, commands: list[str]) -> bool:
    """Whether the session did its task in the way that this user likes. `commands`: what it ran."""
    if not is_done(folder, job):
        return False
    if preference == "conventional":
        return re.match(r"\w+: ", git(folder, "log", "-1", "--format=%s")) is not None
    if preference == "git_tool":
        return any(line.startswith(("git mv", "git rm")) for line in commands)
    return job.note().split('"')[1] in git(folder, "show", f"HEAD:{CHANGES}")
