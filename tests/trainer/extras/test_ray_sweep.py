"""`agentic-train sweep --ray`: a real Ray Tune runs programs that write steps as a run does."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.needs import skip_or_fail
from trainer.errors import ConfigError

try:
    import ray

    from trainer.extras.ray.sweep import run_all
except ImportError:
    skip_or_fail("ray is not installed: pip install 'agentic-rl[ray]'", at_import=True)

pytestmark = pytest.mark.slow

PROGRAM = """\
import json, os, signal, sys, threading, time
folder, reward, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
if steps < 0:
    print("no steps")
    sys.exit(3)
ended = threading.Event()
signal.signal(signal.SIGINT, lambda *_: ended.set())
os.makedirs(folder, exist_ok=True)
with open(folder + "/metrics.jsonl", "a") as file:
    for step in range(1, steps + 1):
        file.write(json.dumps({"step": step, "reward/mean": reward}) + "\\n")
        file.flush()
        if step == 2 and steps > 2:
            ended.wait(600)
        if ended.is_set():
            break
with open(folder + "/end", "w") as file:
    file.write("saved" if ended.is_set() else "done")
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        stack.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            _system_config={"worker_register_timeout_seconds": 300, "worker_niceness": 0},
        )
        yield


def swept(out: Path, runs: Sequence[tuple[float, int]], scheduler: str) -> tuple[int, list[str]]:
    """The exit code and what was said, of runs with a reward and a number of steps each."""
    out.mkdir()
    script = out / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    words = {}
    for number, (reward, steps) in enumerate(runs):
        folder = out / f"seed={number}"
        words[folder] = [str(folder), str(reward), str(steps)]
    said: list[str] = []
    code = run_all(
        words,
        address="auto",
        cpus=1,
        gpus=0,
        scheduler=scheduler,
        grace_steps=2,
        say=said.append,
        program=[sys.executable, str(script)],
    )
    return code, said


def test_each_run_is_a_program_of_its_own_to_its_end(tmp_path: Path) -> None:
    code, said = swept(tmp_path / "out", [(0.5, 2), (0.1, 1)], "fifo")
    assert code == 0
    assert said == ["[1/2] seed=0", "seed=0: 2 steps", "[2/2] seed=1", "seed=1: 1 steps"]
    ends = [(tmp_path / "out" / f"seed={n}" / "end").read_text() for n in range(2)]
    assert ends == ["done", "done"]


def test_a_run_that_falls_behind_is_ended_and_saves(tmp_path: Path) -> None:
    code, said = swept(tmp_path / "out", [(0.9, 2), (0.8, 2), (0.1, 9)], "asha")
    assert code == 0
    assert said[-1] == "seed=2: 2 steps, ended early by the scheduler"
    folder = tmp_path / "out/seed=2"
    assert (folder / "end").read_text() == "saved"
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


def test_a_run_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = swept(out, [(0.5, -1)], "fifo")
    assert code == 0
    assert said[-1] == f"seed=0: 0 steps, exit code 3; see {out}/seed=0.log"
    assert (out / "seed=0.log").read_text() == "no steps\n"


def test_runs_for_which_no_node_has_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no node has 1 cores and 2 cards .* change --cpus"):
        run_all(
            {tmp_path / "a": []}, address="auto", cpus=1, gpus=2, scheduler="fifo",
            grace_steps=1, say=print,
        )  # fmt: skip
