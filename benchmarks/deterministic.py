"""What `trainer.deterministic` costs a training step: the recorded steps of a run, trained again.

    python -m benchmarks.deterministic RUN [--rounds 3]

RUN is the folder of a run with `trainer.deterministic`. Arms alternate, each in a process of its
own: `ordinary` trains without it, `repeatable` with sums in one order, `ledger` also hashes tokens,
gradients and weights and writes the batch. Prints the median of the seconds of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ARMS = ("ordinary", "repeatable", "ledger")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deterministic", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.arm:
        print(*asyncio.run(seconds(arguments.run, arguments.arm)))
        return
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(arguments.rounds):
        for arm in ARMS:
            command = [sys.executable, "-m", "benchmarks.deterministic", str(arguments.run)]
            done = subprocess.run(
                [*command, "--arm", arm], check=True, capture_output=True, encoding="utf-8"
            )
            times[arm] += map(float, done.stdout.split())
    threads, steps = os.environ.get("OMP_NUM_THREADS", "all"), len(times["ledger"])
    print(f"threads: {threads}, steps of each arm: {steps}")
    ordinary = statistics.median(times["ordinary"])
    for arm, each in times.items():
        middle = statistics.median(each)
        print(f"{arm:11} {middle:.3f} s a step, {middle / ordinary:.3f}")


async def seconds(run: Path, arm: str) -> list[float]:
    """The processor seconds of each step after the first one."""
    from trainer.extras.ledger.ledger import Ledger
    from trainer.extras.ledger.record import Record
    from trainer.extras.ledger.replay import replayed
    from trainer.fit import TrainOn
    from trainer.run.folder import RunFolder

    deterministic = str(arm != "ordinary").lower()
    record = Record.open(run, [f"trainer.deterministic={deterministic}"])
    times = []
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.config.write_text("{}", encoding="utf-8")
        ledger = Ledger(folder, record.config.model.path)
        async with replayed(record, 0) as trainer:
            for step in record.lines:
                groups = record.groups(step)
                began = time.process_time()
                done = await trainer.rank_zero.ask(TrainOn(groups, True, arm == "ledger"))
                if arm == "ledger":
                    ledger.write(step, groups, done.evidence)
                    ledger.finish()
                times.append(time.process_time() - began)
        ledger.close()
    return times[1:]


if __name__ == "__main__":
    main()
