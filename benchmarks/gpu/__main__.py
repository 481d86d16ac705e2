"""What only GPUs can show, unattended. The first table takes at most 8 minutes.

    python -m benchmarks.gpu                        one GPU: the first table
    python -m benchmarks.gpu --all                  then also several GPUs, recipes and memory
    python -m benchmarks.gpu --rehearse             the same on a CPU, with tiny sizes
    python -m benchmarks.gpu --only sleep exactness some parts, again if they are done

Each part runs in a process that ends with this one, even by `kill -9`. A part that fails, or lasts
longer than its limit, is a row that says why, and the others go on. Parts that mostly wait for an
engine to be compiled run beside each other where each has `CORES` of the processor's cores. Started
again, it runs the parts that are not done. `results.json`, `results.md` and `logs.tar.gz` are in
`--out`. Exits with 1 if one of the parts asked for failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.endings import reason
from benchmarks.gpu.parts import Part, first_table, further
from benchmarks.gpu.record import Record, figures, heading, line
from proxy.engines import guard

GRACE_S = 20
"""Seconds that a part has to end after SIGTERM."""
CORES = 4
"""Of each of the parts that run beside each other."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    count = torch.cuda.device_count()
    if not count and not given.rehearse:
        raise SystemExit("no GPU here; --rehearse runs the same parts on a CPU")
    first, rest = first_table(), further(count)
    parts = [*first, *rest] if given.all or given.only else first
    chosen = [part for part in parts if not given.only or part.name in given.only]
    if unknown := set(given.only or ()) - {part.name for part in chosen}:
        names = ", ".join(part.name for part in parts)
        raise SystemExit(f"no part {min(unknown)!r}; there are: {names}")
    kind = "-rehearsal" if given.rehearse else ""
    folder: Path = (given.out or Path(f"runs/bench-gpu{kind}")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    order = [part.name for part in (*first, *rest)]
    record = Record(folder, _machine(), rehearsal=given.rehearse, order=order)
    signal.signal(signal.SIGTERM, _leave)
    print(f"{_machine()}; logs in {folder}\n", *heading(), sep="\n", flush=True)
    parts_left = []
    for part in chosen:
        if given.only or record.rows.get(part.name, {}).get("result") != "done":
            parts_left.append(part)
        else:
            print(line(part.name, record.rows[part.name]), flush=True)
    with Runner(folder, count, rehearse=given.rehearse, limit_s=given.limit_s) as runner:
        for beside in _beside(parts_left, alone=given.rehearse):
            for name, row in runner.rows(beside):
                record.keep(name, row)
                print(line(name, row), flush=True)
    print(f"\n{record.page}, {record.file}, {record.archive}")
    results = [record.rows[part.name]["result"] for part in chosen]
    return int(any(result.startswith("failed") for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, without GPUs")
    parser.add_argument("--all", action="store_true", help="not only the first table")
    parser.add_argument("--only", nargs="+", metavar="PART", help="some parts, by name")
    parser.add_argument("--limit-s", type=float, help="of each part, instead of its own")
    parser.add_argument("--out", type=Path, help="default: runs/bench-gpu, or …-rehearsal")
    return parser


def _beside(parts: Sequence[Part], *, alone: bool) -> Iterator[list[Part]]:
    """The parts that run at the same time, in their order."""
    for _, group in groupby(enumerate(parts), lambda each: each[1].beside or each[0]):
        found = [part for _, part in group]
        if alone or (os.cpu_count() or 1) < CORES * len(found):
            yield from ([part] for part in found)
        else:
            yield found


class Runner:
    """Runs parts; none is left when it has ended.

    Example:
        with Runner(folder, 1, rehearse=False) as runner:
            rows = dict(runner.rows([part]))
    """

    def __init__(
        self, out: Path, gpus: int, *, rehearse: bool, limit_s: float | None = None
    ) -> None:
        """`limit_s`: of each part, instead of its own."""
        self.out, self.gpus, self.rehearse, self.limit_s = out, gpus, rehearse, limit_s
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def rows(self, parts: Sequence[Part]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Runs the parts at the same time; each one's name and row, in the order of their ends."""
        with ThreadPoolExecutor(len(parts)) as pool:
            running = {pool.submit(self._row, part): part for part in parts}
            try:
                for future in as_completed(running):
                    yield running[future].name, future.result()
            except BaseException:
                self._end()  # or the threads would wait for their parts
                raise

    def _end(self) -> None:
        self._ended = True
        for process in list(self._processes):
            process.terminate()

    def _row(self, part: Part) -> dict[str, Any]:
        if not self.rehearse and part.gpus > self.gpus:
            return {"result": f"needs {part.gpus} GPUs", "seconds": 0.0}
        folder = self.out / part.name.replace(" ", "-").replace(",", "")
        if not part.module:  # a run that was stopped begins again: its first step is the first
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        words = part.words(str(folder), rehearse=self.rehearse)
        program = [sys.executable, "-m", part.module] if part.module else part.program
        limit_s = self.limit_s or (7200.0 if self.rehearse else part.limit_s)
        log, began, commands = folder / "output.log", time.monotonic(), [[*program, *words]]
        if part.before and not self.rehearse:
            before = [word.replace("{folder}", str(folder)) for word in part.before]
            commands.insert(0, [sys.executable, "-m", *before])
        server = {"HARBOR_SERVER_PORT": "0", "HARBOR_STATE_DIR": str(self.out / "harbor-server")}
        result, began_at, code = "done", 0.0, None
        with log.open("w", encoding="utf-8") as output:
            for command in commands:
                began_at = time.time()
                left_s = max(0.0, limit_s - (time.monotonic() - began))
                code = self._executed(command, output.fileno(), os.environ | server, left_s)
                if code != 0:
                    break
        text = log.read_text(encoding="utf-8", errors="replace")
        if code is None:
            result = f"failed: more than {limit_s:g} s"
        elif code:
            result = f"failed: {reason(code, text)}"
        row: dict[str, Any] = {
            "result": result,
            "seconds": round(time.monotonic() - began, 1),
            "commit": _commit(),
            "began_at": began_at,
        }
        if part.module:
            return row | {"table": [each for each in text.splitlines() if each.startswith("|")]}
        return row | figures(folder / "run", text, began_at)

    def _executed(
        self, command: Sequence[str], output: int, environment: dict[str, str], limit_s: float
    ) -> int | None:
        """The exit status; None if it was ended after `limit_s`. Nothing that it started is
        left."""
        guarded = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(GRACE_S)]
        process = subprocess.Popen(
            [*guarded, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends the part
        )
        self._processes.add(process)
        with process:
            if self._ended:
                process.terminate()
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                process.terminate()
                process.wait()
                self._processes.discard(process)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _commit() -> str:
    """The checkout; empty where there is no git, as on a machine to which it was copied."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    return done.stdout.strip()


def _machine() -> str:
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return f"{', '.join(gpus) or 'no GPU'}, torch {torch.__version__}"


if __name__ == "__main__":
    sys.exit(main())
