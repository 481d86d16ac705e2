"""Runs the parts of the tests, each three times, beside processes that take all processors.

    python -m tests.beside_spinners                       # every part that has not passed yet
    python -m tests.beside_spinners tests/proxy/serving   # one part

A part is a folder of tests, or a file among folders; long tests are left out. What passed, and at
which commit, is kept in `--state`, a file of the repository, so that the program can be ended
(Ctrl-C) and goes on where it was, in another clone, too. A part that failed runs again at the next
start. The exit status is 1 if a part failed, and the log of each failure is kept in LOGS.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMES, SPINNERS = 3, 4
LOGS = ROOT / ".cache/spinners"
PER_FILE = ("tests/e2e", "tests/e2e/agents", "tests/attacks")
"""Folders whose files are parts of their own: each takes minutes there."""


def parts() -> list[str]:
    """The folders with test files that git knows; single files of `PER_FILE` and of the top."""
    listed = subprocess.run(
        ["git", "ls-files", "tests/**/test_*.py", "tests/test_*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    found = dict[str, None]()
    for file in sorted(set(listed)):
        folder = str(Path(file).parent)
        found[file if folder in PER_FILE else folder] = None
    return list(found)


@contextmanager
def spinning(count: int) -> Iterator[None]:
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


def run_part(part: str, log: Path) -> int:
    """pytest's exit status; 5 (no tests but long ones) counts as passed."""
    files = (
        [part] if part.endswith(".py") else sorted(str(p) for p in (ROOT / part).glob("test_*.py"))
    )
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-rf", *files],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
            check=False,
        )
    return 0 if done.returncode == 5 else done.returncode


def commit() -> str:
    """Of the tests that run. Example: `5fc8bc53`"""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Passed:
    """Part → the commit at which it passed, each time; kept in a file."""

    def __init__(self, state: Path, times: int) -> None:
        self.state, self.times = state, times
        self.commits: dict[str, list[str]] = json.loads(state.read_text()) if state.exists() else {}
        self._writes = threading.Lock()

    def count(self, part: str) -> int:
        return len(self.commits.get(part, ()))

    def add(self, part: str, at: str) -> None:
        with self._writes:
            self.commits.setdefault(part, []).append(at)
            self.state.write_text(json.dumps(self.commits, indent=1, sort_keys=True) + "\n")

    def run(self, part: str, at: str) -> bool:
        """Whether the part has passed as often as is asked."""
        while self.count(part) < self.times:
            log = LOGS / f"{part.replace('/', '-')}-{self.count(part) + 1}.log"
            began = time.monotonic()
            status = run_part(part, log)
            took = f"{time.monotonic() - began:.0f} s"
            if status:
                print(f"{part}: failed after {took}, see {log}", flush=True)
                return False
            self.add(part, at)
            print(f"{part}: passed, time {self.count(part)} of {self.times}, {took}", flush=True)
            log.unlink()
        return True


def beside_spinners(chosen: Sequence[str], spinners: int, passed: Passed, at_once: int) -> bool:
    """Whether each part has passed."""
    at = commit()
    with spinning(spinners), ThreadPoolExecutor(at_once) as pool:
        try:
            found = list(pool.map(lambda part: passed.run(part, at), chosen))
        except KeyboardInterrupt:  # the parts that run have it, too
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    done = sum(passed.count(part) >= passed.times for part in parts())
    print(f"{done} of {len(parts())} parts have passed {passed.times} times")
    return all(found)


def main() -> int:
    program = "python -m tests.beside_spinners"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--spinners", type=int, default=SPINNERS)
    parser.add_argument("--at-once", type=int, default=1, help="parts that run at the same time")
    parser.add_argument("--state", type=Path, default=ROOT / "docs/notes/beside_spinners.json")
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - set(parts())):
        parser.error(f"no parts: {', '.join(unknown)}; the parts are folders such as {parts()[0]}")
    LOGS.mkdir(parents=True, exist_ok=True)
    passed = Passed(given.state.absolute(), given.times)
    try:
        found = beside_spinners(given.parts or parts(), given.spinners, passed, given.at_once)
    except KeyboardInterrupt:
        return 130
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
