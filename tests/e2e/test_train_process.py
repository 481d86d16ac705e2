"""`agentic-train` on a real vLLM, while the run or one of its processes is killed or stopped.

Each step of a run counts once, however often the run was interrupted, and no process that the
trainer started outlives it.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from proxy.engines.vllm_server import VllmServer
from proxy.run_files.files import read_jsonl
from tests.e2e.steady_agent import TURNS
from tests.forked_processes import ForkedProgram
from tests.processes import assert_all_end, command_line, descendants, watched
from trainer.checkpoint import Checkpoints
from trainer.optimizer_config import OptimizerConfig
from trainer.policy.model_config import ModelConfig
from trainer.policy.policy import Policy
from trainer.run.folder import RunFolder
from trainer.weight_sync.control import EngineControl
from trainer.weight_sync.sync import WeightSync

pytestmark = pytest.mark.engine

STEPS = 4
TRIALS_PER_STEP = 4
DEADLINE_S = 600.0
"""Time limit of every wait; on a quiet machine, waits take seconds."""
REWARD = 'tr -dc a-z < answer | wc -c > "$REWARD_DIR/reward.txt"'
TIMED = ("time", "throughput/", "sync/", "memory/", "rollout/seconds")
KILLS = (
    ("agent_loop.remote_agent_loop:_TrialRun._launch", 3),  # while the first step samples
    ("trainer.policy.policy:Policy.step", 3),  # between two mini-batches of the second
    ("trainer.checkpoint:_export", 2),  # while the third's checkpoint is written
    ("trainer.weight_sync.control:EngineControl.finish_weight_update", 2),  # engine half updated
)


@dataclass
class Train:
    """A trainer's process, the reports of its agents, and its descendants."""

    module: str
    """Executed with `words` as `python -m` does it."""
    words: Sequence[str]
    fifo: Path
    log: Path
    anew: bool = False
    """Whether its process imports everything itself, which is shown once."""
    process: subprocess.Popen[bytes] | ForkedProgram = field(init=False)
    _words: int = field(init=False)
    _heard: bytes = b""

    def __enter__(self) -> Self:
        self._words = os.open(self.fifo, os.O_RDWR)
        env = as_from_a_shell() | {"OMP_NUM_THREADS": "1"}
        # In a session of its own, so that its Ctrl-C does not reach the test itself.
        if not self.anew:
            self.process = ForkedProgram(self.module, *self.words, log=self.log, env=env)
            return self
        argv = [sys.executable, "-m", self.module, *self.words]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, stdout=log, stderr=log, env=env, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._words)

    def word(self) -> tuple[str, int]:
        """The next report of an agent, and its process id."""
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
        """Each descendant, as `tests.processes.watched`."""
        return watched(self.process.pid)


def as_from_a_shell() -> dict[str, str]:
    """Our environment without what importing torch has added to it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}


@pytest.fixture(scope="module")
def engine(vllm: VllmServer, tiny_model: Path) -> Iterator[str]:
    """The shared vLLM. Its own weights are restored after the test."""
    yield vllm.url
    sync = WeightSync(EngineControl([vllm.url]))
    sync.push(Policy(ModelConfig(path=tiny_model), OptimizerConfig()).named_hf_parameters(), 0)
    sync.close()


def configure(folder: Path, model: Path, engine: dict[str, Any], *agent_mode: str) -> Path:
    """The configuration's file. Trials run one after another with seeds: the run is repeatable."""
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
    # Without a first trial alone: the tests count the agents that report.
    settings["trainer"] |= {"save_every": 1, "preflight_s": 0}  # type: ignore[operator]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def train(
    folder: Path, *words: str, killed_at: tuple[str, int] | None = None, anew: bool = False
) -> Train:
    module = "trainer.cli"
    if killed_at is not None:
        module, words = "tests.e2e.killed_train", (killed_at[0], str(killed_at[1]), *words)
    return Train(module, words, folder / "words", folder / "said.log", anew=anew)


def begin(folder: Path, **options: Any) -> Train:
    return train(folder, "--config", str(folder / "config.yaml"), **options)


def resume(folder: Path, **options: Any) -> Train:
    return train(folder, "resume", str(folder / "run"), **options)


def steps(folder: Path) -> list[dict[str, Any]]:
    """The entries of each line of the metrics that do not depend on the clock."""
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
    """Metrics of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    configure(folder, tiny_model, {"urls": [engine]})
    with begin(folder, anew=True) as run:
        assert run.wait() == 0, run.said
    assert summary(folder)["status"] == "done"
    assert len({trial["reward"] for trial in trials(folder)}) > 1
    return steps(folder)


def test_run_killed_in_every_phase_equals_an_undisturbed_run(
    engine: str, tiny_model: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    # `resume RUN`, and the same command again: `trainer.resume: auto` continues the run.
    for start, kill in zip((begin, resume, begin, resume), KILLS, strict=True):
        with start(tmp_path, killed_at=kill) as run:
            assert run.wait() == -signal.SIGKILL, run.said
        assert summary(tmp_path)["status"] == "killed"
    with begin(tmp_path) as run:
        assert run.wait() == 0, run.said
    assert not (tmp_path / "run-2").exists()
    assert_equal(steps(tmp_path), whole)
    done = trials(tmp_path)
    assert [trial["step"] for trial in done] == sorted([*range(1, STEPS + 1)] * TRIALS_PER_STEP)
    assert len({trial["trial_id"] for trial in done}) == STEPS * TRIALS_PER_STEP
    saved = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2).latest()
    assert saved is not None
    assert saved.step == STEPS


def test_killed_proxy_is_restarted_and_nothing_is_lost(
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
    # A call that had begun when the proxy was killed is recorded, and its retry is its sibling.
    lines = steps(tmp_path)
    assert sum(line.pop("forks/sibling", 0.0) for line in lines) <= killed
    assert_equal(lines, whole)
    # None failed: an answer ends at its limit, or by itself.
    assert {trial["status"] for trial in trials(tmp_path)} <= {"truncated", "done"}
    assert {trial["turns"] for trial in trials(tmp_path)} == {TURNS}


def assert_page_shows_the_first_step(said: str) -> None:
    """The link that the run printed opens its page, which has the step that has ended."""
    file = re.search(r"see everything, live: http\S+ \(the link in (\S+) opens it once", said)
    assert file is not None, said
    link = re.fullmatch(r"(http\S+)/#link=(\S+)\n", Path(file[1]).read_text())
    assert link is not None
    assert link[2] not in said
    url, secret = link.groups()
    with httpx.Client(base_url=url) as opened:
        assert opened.post("/view/log_in", json={"secret": secret}).status_code == 200
        assert httpx.post(f"{url}/view/log_in", json={"secret": secret}).status_code == 401
        (name,) = (each["name"] for each in opened.get("/view/state").json()["runs"])
        metrics = opened.get("/view/run/metrics", params={"run": name})
    assert metrics.status_code == 200, metrics.text
    assert '"step":1' in metrics.text.replace(" ", "")


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)],
)
def test_signal_saves_and_ends_everything(
    engine: str, tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """SIGHUP has the same handler, as `tests/trainer/run/test_control.py` shows, and ends other
    processes as SIGTERM does."""
    configure(tmp_path, tiny_model, {"urls": [engine]})
    with train(tmp_path, "--config", str(tmp_path / "config.yaml"), "trainer.save_every=0") as run:
        for _ in range(TRIALS_PER_STEP * TURNS + 1):  # into the second step
            run.word()
        watched = run.watch()
        assert any("steady_agent" in command for command in watched.values())
        assert_page_shows_the_first_step(run.said)
        os.killpg(run.process.pid, number)
        assert run.wait() == 128 + number, run.said
        assert "Traceback" not in run.said
        assert_all_end(watched)
    assert summary(tmp_path)["status"] == "stopped"
    assert (tmp_path / "run" / "report.html").is_file()
    saved = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=2).latest()
    assert saved is not None
    assert saved.step == 1


def test_second_ctrl_c_ends_immediately_without_traceback(
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
        assert_all_end(watched)
        assert "Traceback" not in run.said


@pytest.mark.parametrize(
    "parts",
    [("engine core",), pytest.param(("server", "engine core"), marks=pytest.mark.long)],
    ids=", ".join,
)
def test_killed_vllm_is_replaced_and_kill_9_of_the_trainer_ends_everything(
    parts: Sequence[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Without its engine process, a server goes on listening: the harder of both to notice. Each
    replacement starts one more vLLM."""
    configure(tmp_path, tiny_model, {"max_context_tokens": 512, "max_sequences": 4})
    replaced: list[int] = []
    with begin(tmp_path) as run:
        assert run.word()[0] == "answered"
        (server,) = servers(run)
        assert "--model" not in command_line(server)  # it started before that was known
        for part in parts:
            os.kill(server if part == "server" else engine_core(server), signal.SIGKILL)
            replaced.append(server)
            for _ in range(TRIALS_PER_STEP * TURNS):  # into the next step
                run.word()
            (server,) = servers(run)
            assert server not in replaced
        watched = run.watch()
        commands = "\n".join(watched.values())
        assert all(part in commands for part in ("vllm_launch", "proxy serve", "steady_agent.py"))
        run.process.kill()
        assert_all_end(watched)


@pytest.mark.long
@pytest.mark.parametrize("part", ["server", "core"])
def test_vllm_killed_in_its_first_update_is_replaced(
    part: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Without its engine process, the server closes its port and never answers the request."""
    configure(tmp_path, tiny_model, {"max_context_tokens": 512, "max_sequences": 4})
    killed = "/init_weight_transfer_engine", "1", part
    words = *killed, "--config", str(tmp_path / "config.yaml"), "trainer.steps=1"
    program = "tests.e2e.killed_engine"
    with Train(program, words, tmp_path / "words", tmp_path / "said.log") as run:
        assert run.wait() == 0, run.said
    assert run.said.count("warning: engine-0 ended with") == 1
    assert summary(tmp_path)["status"] == "done"


def servers(run: Train) -> list[int]:
    start = f"{sys.executable} -m proxy.engines.vllm_launch"
    return [pid for pid in descendants(run.process.pid) if command_line(pid).startswith(start)]


def engine_core(server: int) -> int:
    (core,) = [pid for pid in descendants(server) if "EngineCore" in command_line(pid)]
    return core


def test_low_level_main_trains_an_agent(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    words = "--config", str(tmp_path / "config.yaml"), "trainer.steps=2"
    program = "trainer.mains.low_level"
    with Train(program, words, tmp_path / "words", tmp_path / "said.log") as run:
        assert run.wait() == 0, run.said
    assert "step 2: reward" in run.said
    saved = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=1).latest()
    assert saved is not None
    assert saved.step == 2


def test_the_same_command_continues_a_killed_asynchronous_run(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    words = "--config", str(tmp_path / "config.yaml"), "trainer.mode=separate"
    with train(tmp_path, *words, killed_at=("trainer.policy.policy:Policy.step", 5)) as run:
        assert run.wait() == -signal.SIGKILL, run.said  # in the third step
    with train(tmp_path, *words) as run:
        assert run.wait() == 0, run.said
    assert "continuing from" in run.said
    assert not (tmp_path / "run-2").exists()
    assert [line["step"] for line in steps(tmp_path)] == list(range(1, STEPS + 1))
    done = trials(tmp_path)
    assert [trial["step"] for trial in done] == sorted([*range(1, STEPS + 1)] * TRIALS_PER_STEP)
    assert len({trial["trial_id"] for trial in done}) == STEPS * TRIALS_PER_STEP


def test_a_verifier_that_crashes_ends_the_run_with_its_last_line(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    verifier = f"remote_agent.verifier.argv=[{sys.executable}, -c, 'import nosuchmodule']"
    words = "--config", str(tmp_path / "config.yaml"), verifier, "trainer.preflight_s=60"
    with train(tmp_path, *words) as run:
        assert run.wait() == 1, run.said
    last = run.said.strip().splitlines()[-1]
    assert last.startswith("agentic-train: preflight: 2 trials of different tasks failed")
    tried = [each.name.partition("-")[0] for each in (tmp_path / "run" / "trials").iterdir()]
    assert len(set(tried)) == 2
    assert len(tried) == 4  # remote_agent.max_retries
    assert "verdict: failing. 2 of the last 2 trials failed" in run.said
    assert "No module named 'nosuchmodule'" in last
    assert "\nTraceback" not in run.said  # but that of the verifier, which the verdict shows
    assert summary(tmp_path)["status"] == "failed"


def test_equal_rewards_are_reported_and_end_the_run(
    engine: str, tiny_model: Path, tmp_path: Path
) -> None:
    configure(tmp_path, tiny_model, {"urls": [engine]})
    words = "remote_agent.verifier.argv=['true']", "trainer.no_signal_steps=2"
    with train(tmp_path, "--config", str(tmp_path / "config.yaml"), *words) as run:
        assert run.wait() == 1, run.said
    assert "step 1: no signal: all advantages are 0" in run.said
    last = run.said.strip().splitlines()[-1]
    assert last.startswith("agentic-train: 2 steps in a row without a signal")
    assert summary(tmp_path)["status"] == "failed"
    assert "no signal" in RunFolder(tmp_path / "run").report.read_text()
