"""Seconds from `agentic-train` to the first sampled token of the quickstart.

Also the processor time that all processes of the run have used by then, which other work on the
machine changes less. `--against DIR` measures another checkout, such as an older commit with its
own `.venv`, in turns with this one.
"""

from __future__ import annotations

import argparse
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from statistics import median

import psutil

from trainer.run.folder import RunFolder

HERE = Path(__file__).resolve().parents[1]
POLL_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout")
    given = parser.parse_args()
    places = [HERE, *([given.against.absolute()] if given.against else [])]
    measured: dict[Path, list[tuple[float, float]]] = {place: [] for place in places}
    for _ in range(given.repeats):
        for place in places:
            measured[place].append(start(place))
            wall_s, cpu_s = measured[place][-1]
            sys.stderr.write(f"{place}: {wall_s:.1f} s, {cpu_s:.1f} s of processor time\n")
    print("| checkout | seconds to the first token | processor seconds |\n|---|---|---|")
    for place, figures in measured.items():
        walls, cpus = zip(*figures, strict=True)
        print(
            f"| {place.name} | {median(walls):.1f} ({min(walls):.1f} to {max(walls):.1f}) "
            f"| {median(cpus):.1f} |"
        )


def start(place: Path, *settings: str) -> tuple[float, float]:
    """Seconds, and processor seconds of all processes, until a token has been sampled."""
    with tempfile.TemporaryDirectory() as runs, tempfile.TemporaryFile() as output:
        run = Path(runs, "run")
        command = [".venv/bin/agentic-train", "--config", "agentic_trainer.yaml"]
        began_at = time.time()
        process = subprocess.Popen(
            [*command, f"trainer.run_dir={run}", *settings], cwd=place, stdout=output, stderr=output
        )
        try:
            used: dict[int, float] = {}
            while (first_at := _first_token_at(RunFolder(run).sessions)) is None:
                if process.poll() is not None:
                    output.seek(0)
                    raise SystemExit(f"the run ended: {output.read().decode()}")
                _add_used(used, psutil.Process(process.pid))
                time.sleep(POLL_S)
            return first_at - began_at, sum(used.values())
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def _add_used(used: dict[int, float], process: psutil.Process) -> None:
    """Notes what each process has used; one that has ended keeps its last figure."""
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            times = each.cpu_times()
            used[each.pid] = times.user + times.system


def _first_token_at(sessions: Path) -> float | None:
    """When the first token of the run was sampled; None if none was."""
    if not sessions.exists():
        return None
    # An error: the proxy has not made the tables yet.
    with (
        closing(sqlite3.connect(f"file:{sessions}?mode=ro", uri=True)) as store,
        suppress(sqlite3.OperationalError),
    ):
        found = store.execute(
            "SELECT min(t.started_at + a.first_token_s) FROM answers a"
            " JOIN turns t USING (session_id, idx) WHERE a.first_token_s IS NOT NULL"
        ).fetchone()[0]
        return None if found is None else float(found)
    return None


if __name__ == "__main__":
    main()
