"""Runs the parts of the tests, each three times, beside processes that take all processors.

    python -m tests.beside_spinners                       # every part that has not passed yet
    python -m tests.beside_spinners tests/proxy/serving   # one part

A part is a folder of tests, or a file among folders; long tests are left out. What passed is kept
in `--state`, so that the program can be ended (Ctrl-C) and goes on where it was. A part that failed
runs again at the next start. The exit status is 1 if a part failed, and the log of each failure is
kept beside the state.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMES, SPINNERS = 3, 4
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


def beside_spinners(chosen: Sequence[str], times: int, spinners: int, state: Path) -> list[str]:
    """The parts that failed."""
    passed: dict[str, int] = json.loads(state.read_text()) if state.exists() else {}
    failed = list[str]()
    with spinning(spinners):
        for part in chosen:
            while passed.get(part, 0) < times:
                log = state.with_name(f"{part.replace('/', '-')}-{passed.get(part, 0) + 1}.log")
                began = time.monotonic()
                status = run_part(part, log)
                took = f"{time.monotonic() - began:.0f} s"
                if status:
                    print(f"{part}: failed after {took}, see {log}", flush=True)
                    failed.append(part)
                    break
                passed[part] = passed.get(part, 0) + 1
                state.write_text(json.dumps(passed, indent=1))
                print(f"{part}: passed, time {passed[part]} of {times}, {took}", flush=True)
                log.unlink()
    left = [part for part in parts() if passed.get(part, 0) < times]
    print(f"{len(parts()) - len(left)} of {len(parts())} parts have passed {times} times")
    return failed


def main() -> int:
    program = "python -m tests.beside_spinners"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--spinners", type=int, default=SPINNERS)
    parser.add_argument("--state", type=Path, default=ROOT / ".cache/spinners/passed.json")
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - set(parts())):
        parser.error(f"no parts: {', '.join(unknown)}; the parts are folders such as {parts()[0]}")
    given.state.parent.mkdir(parents=True, exist_ok=True)
    try:
        failed = beside_spinners(
            given.parts or parts(), given.times, given.spinners, given.state.absolute()
        )
    except KeyboardInterrupt:
        return 130
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
