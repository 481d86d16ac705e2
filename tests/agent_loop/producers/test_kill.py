"""A run that is killed by `kill -9` at random instants and resumed each time. Over all of its
processes, every group is consumed once, as far as checkpoints contain it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from agent_loop.producers.asynchronous import AsyncProducer
from agent_loop.producers.buffer import ReplayBuffer, Written
from agent_loop.producers.rollout_config import RolloutConfig
from agent_loop.records import Task
from agent_loop.tasks import Source, TaskStream
from tests.agent_loop.scripted_loop import ScriptedLoop

STEPS = 60


class DropsAreWritten(ReplayBuffer):
    """Writes down which groups are dropped: on a busy machine a group may become too old, and is
    then not trained."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "buffer.sqlite")
        self._dropped = folder / "dropped"

    def drop(self, numbers: Iterable[int]) -> Written:
        numbers = list(numbers)
        with self._dropped.open("a") as file:
            file.write("".join(f"{number}\n" for number in numbers))
        return super().drop(numbers)


async def live(folder: Path) -> None:
    """One process of the run: resumes from the last checkpoint, and trains until the end or until
    it is killed."""
    checkpoint = folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    stream = TaskStream([Source("a", [Task(f"a{i}", {}, "a") for i in range(1000)])], seed=0)
    loop = ScriptedLoop(duration=lambda seed: seed % 7 / 2000)
    settings = RolloutConfig(groups_per_step=3, group_size=2, max_staleness=2)
    buffer = DropsAreWritten(folder)
    trained = list(state["trained"]) if state else []
    async with AsyncProducer(loop, stream, settings, seed=0, buffer=buffer) as producer:
        producer.start(len(trained), state and state["producer"])
        while len(trained) < STEPS:
            groups = await producer.next_batch(len(trained))
            trained.append([group.group_id for group in groups])
            producer.set_version(len(trained))
            if len(trained) % 2 == 0:
                saved = producer.state()
                written = json.dumps({"producer": saved, "trained": trained})
                (folder / "new.json").write_text(written)
                (folder / "new.json").rename(checkpoint)
                producer.acknowledge(saved)
            print(len(trained), flush=True)
    buffer.close()


RUN = """
import asyncio, sys
from pathlib import Path
from tests.agent_loop.producers.test_kill import live
asyncio.run(live(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_every_group_is_trained_once_in_a_run_that_is_killed_repeatedly(tmp_path: Path) -> None:
    for life in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(5 + 4 * life % 7):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    (tmp_path / "dropped").touch()
    subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], check=True, capture_output=True)
    trained = json.loads((tmp_path / "checkpoint.json").read_text())["trained"]
    numbers = [int(group[1:]) for batch in trained for group in batch]
    assert len(trained) == STEPS
    assert len(numbers) == len(set(numbers)) == 3 * STEPS
    dropped = {int(line) for line in (tmp_path / "dropped").read_text().split()}
    missing = set(range(max(numbers))) - set(numbers) - dropped
    assert len(missing) <= 3 * 3  # drawn but not trained: at most max_staleness + 1 batches
