"""The processes below a process, and whether they end."""

from __future__ import annotations

import os
import select
from pathlib import Path


def watched(pid: int) -> dict[int, str]:
    """A pidfd of each process below it, which shows when it ends → its command line."""
    return {os.pidfd_open(each): command_line(each) for each in descendants(pid)}


def descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def assert_all_end(watched: dict[int, str]) -> None:
    for pidfd, command in watched.items():
        assert select.select([pidfd], [], [], 60)[0], f"still there: {command}"
        os.close(pidfd)
