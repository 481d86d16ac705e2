"""`agentic-train` as a process that is killed, stopped and robbed of its parts, on a real vLLM.

Each of a run's steps counts once, however often the run was cut; and whatever happens to the
trainer, no process that it started outlives it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from proxy.engines.vllm_server import VllmServer
from tests.e2e.steady_agent import TURNS
from trainer.checkpoint import Checkpoints
from trainer.policy.model import ModelConfig
from trainer.policy.optimizer import OptimizerConfig
from trainer.policy.policy import Policy
from trainer.run.folder import RunFolder, read_jsonl
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

pytestmark = pytest.mark.engine

STEPS = 4
TRIALS_PER_STEP = 4
DEADLINE_S = 600.0
"""For whatever a test waits for; met in seconds on a quiet machine."""
REWARD = 'tr -dc a-z < answer | wc -c > "$REWARD_DIR/reward.txt"'
TIMED = ("time", "throughput/", "sync/", "memory/", "rollout/seconds")
KILLS = (
    ("agent_loop.remote_agent_loop:RemoteAgentLoop._trial", 3),  # while the first step samples
    ("trainer.policy.policy:Policy.step", 3),  # between two mini-batches of the second
    ("trainer.checkpoint:_export", 2),  # while the third's checkpoint is written
    ("trainer.weight_sync.control:EngineControl.finish_weight_update", 2),  # engine half updated
)


@dataclass
class Train:
    """A trainer's process, its agents' words, and the processes below it."""

    argv: list[str]
    fifo: Path
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)
    _words: int = field(init=False)
    _heard: bytes = b""

    def __enter__(self) -> Self:
        self._words = os.open(self.fifo, os.O_RDWR)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # a Ctrl-C of the test is not the test's own
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._words)

    def word(self) -> tuple[str, int]:
        """An agent's next word, and its process."""
        while b"\n" not in self._heard:
            assert select.select([self._words], [], [], DEADLINE_S)[0], self.said
            self._heard += os.read(self._words, 4096)
        line, _, self._heard = self._heard.partition(b"\n")
        word, pid = line.decode().split()
        return word, int(pid)

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    @property
    def said(self) -> str:
        return self.log.read_text()

    def watch(self) -> dict[int, str]:
        """Every process below: its command line, by a pidfd that tells its end."""
        found = {}
        for pid in descendants(self.process.pid):
            found[os.pidfd_open(pid)] = command_line(pid)
        return found


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


@pytest.fixture(scope="module")
def engine(vllm: VllmServer, tiny_model: Path) -> Iterator[str]:
    """The one vLLM, which gets its own weights back."""
    yield vllm.url
    sync = WeightSync(EngineControl([vllm.url]))
    sync.push(Policy(ModelConfig(path=tiny_model), OptimizerConfig()).named_hf_parameters(), 0)
    sync.close()


def configure(folder: Path, model: Path, engine: dict[str, Any], *agent_mode: str) -> Path:
    """The configuration's file. Trials run one after another, with seeds: a run that repeats."""
    (folder / "tasks.jsonl").write_text(
        "".join(json.dumps({"task_id": w, "prompt": f"Say {w}."}) + "\n" for w in "abcdef")
    )
    if not (folder / "words").exists():
        os.mkfifo(folder / "words")
    agent = [sys.executable, "-I", "-S", str(Path(__file__).with_name("steady_agent.py"))]
    settings = {
        "model": {"path": str(model)},
        "data": {"train_files": [str(folder / "tasks.jsonl")]},
        "engine": engine,
        "remote_agent": {
            "command": {"argv": [*agent, str(folder / "words"), *agent_mode]},
            "verifier": {"argv": ["sh", "-c", REWARD]},
        },
        "rollout": {"groups_per_step": 2, "group_size": 2, "concurrency": 1, "seeded": True},
        "algorithm": {"mini_batches": 2},
        "optimizer": {"lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
        "trainer": {"run_dir": str(folder / "run"), "steps": STEPS, "device": "cpu"},
        "logging": {"tensorboard": False, "progress": "plain"},
    }
    settings["trainer"]["save_every"] = 1  # type: ignore[index]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def train(folder: Path, *words: str, killed_at: tuple[str, int] | None = None) -> Train:
    if killed_at is None:
        program = ["-m", "trainer.cli"]
    else:
        program = ["-m", "tests.e2e.killed_train", killed_at[0], str(killed_at[1])]
    return Train([sys.executable, *program, *words], folder / "words", folder / "said.log")


def begin(folder: Path, **options: Any) -> Train:
    return train(folder, "--config", str(folder / "config.yaml"), **options)


def resume(folder: Path, **options: Any) -> Train:
    return train(folder, "resume", str(folder / "run"), **options)


def steps(folder: Path) -> list[dict[str, Any]]:
    """Of each line of the metrics, what does not depend on the clock."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMED)}
        for line in read_jsonl(RunFolder(folder / "run").metrics)
    ]


def trials(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(RunFolder(folder / "run").trials_log))


def summary(folder: Path) -> dict[str, Any]:
    return RunFolder(folder / "run").read_summary()


def assert_equal(cut: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert [line["step"] for line in cut] == [line["step"] for line in whole]
    for ours, theirs in zip(cut, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.fixture(scope="module")
def whole(
    engine: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Metrics of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    configure(folder, tiny_model, {"urls": [engine]})
    with begin(folder) as run:
        assert run.wait() == 0, run.said
    assert summary(folder)["status"] == "done"
    assert len({trial["reward"] for trial in trials(folder)}) > 1
    return steps(folder)


def test_a_run_killed_in_every_phase_equals_one_that_was_not(
    engine: str, tiny_model: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    start = begin
    for kill in KILLS:
        with start(tmp_path, killed_at=kill) as run:
            assert run.wait() == -signal.SIGKILL, run.said
        start = resume
    with resume(tmp_path) as run:
        assert run.wait() == 0, run.said
    assert_equal(steps(tmp_path), whole)
    done = trials(tmp_path)
    assert [trial["step"] for trial in done] == sorted([*range(1, STEPS + 1)] * TRIALS_PER_STEP)
    assert len({trial["trial_id"] for trial in done}) == STEPS * TRIALS_PER_STEP
    saved = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2).latest()
    assert saved is not None
    assert saved.step == STEPS


def test_a_proxy_that_is_killed_is_started_again_and_nothing_is_lost(
    engine: str, tiny_model: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    killed = 0
    with begin(tmp_path) as run:
        for answer in range(STEPS * TRIALS_PER_STEP * TURNS):
            assert run.word()[0] == "answered"
            if answer in (2, 9, 15):
                for pid in descendants(run.process.pid):
                    if "proxy serve" in command_line(pid) and "guard" not in command_line(pid):
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
        assert run.wait() == 0, run.said
        assert run.said.count("warning: the proxy ended") == killed == 3
    assert_equal(steps(tmp_path), whole)
    # The agent asks for answers of a given length, here as in the whole run: none failed.
    assert {trial["status"] for trial in trials(tmp_path)} == {"truncated"}
    assert {trial["turns"] for trial in trials(tmp_path)} == {TURNS}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_everything(
    engine: str, tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    with train(tmp_path, "--config", str(tmp_path / "config.yaml"), "trainer.save_every=0") as run:
        for _ in range(TRIALS_PER_STEP * TURNS + 1):  # into the second step
            run.word()
        watched = run.watch()
        assert any("steady_agent" in command for command in watched.values())
        os.killpg(run.process.pid, number)
        assert run.wait() == 128 + number, run.said
        assert "Traceback" not in run.said
        assert_all_end(watched)
    assert summary(tmp_path)["status"] == "stopped"
    assert (tmp_path / "run" / "report.html").is_file()
    saved = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2).latest()
    assert saved is not None
    assert saved.step == 1


def test_a_second_ctrl_c_ends_at_once_and_quietly(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]}, "stubborn")
    with begin(tmp_path) as run:
        assert run.word()[0] == "answered"
        watched = run.watch()
        run.ctrl_c()
        assert run.word()[0] == "SIGTERM"  # of the clean-up, which now waits for the agent
        run.ctrl_c()
        assert run.wait() == -signal.SIGINT, run.said
        assert "Traceback" not in run.said
        assert_all_end(watched)


def test_a_vllm_that_is_killed_is_replaced_and_kill_9_of_the_trainer_ends_all(
    tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"max_context_tokens": 512, "max_sequences": 4})
    with begin(tmp_path) as run:
        assert run.word()[0] == "answered"
        (server,) = servers(run)
        os.kill(server, signal.SIGKILL)
        for _ in range(TRIALS_PER_STEP * TURNS):  # into the second step
            run.word()
        assert servers(run) != [server]
        watched = run.watch()
        commands = "\n".join(watched.values())
        assert all(part in commands for part in ("vllm.", "proxy serve", "steady_agent.py"))
        run.process.kill()
        assert_all_end(watched)


def servers(run: Train) -> list[int]:
    start = f"{sys.executable} -m vllm."
    return [pid for pid in descendants(run.process.pid) if command_line(pid).startswith(start)]
