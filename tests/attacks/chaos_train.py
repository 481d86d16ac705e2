"""`agentic-train`, whose processes are killed or stopped at every phase of its steps.

    python -m tests.attacks.chaos_train --rounds 100 --seed 7

A round is `kill -9`, or SIGSTOP and SIGCONT, of one process of a run: the trainer, its ranks, the
proxy, an engine, their guards, the holder of the weights in memory, the server that agents are
forked from, an agent. It happens while the run stands at one of the points of `chaos_program`, or a
moment later. A run that has ended is continued, by `resume` or by the same command. What must hold
of every run, which is deterministic: it reaches its last step, its audit is clean, and the weights
after each step are those of an undisturbed run. The seed of a trial and of each of its calls do not
depend on how often they were begun, so that also a trial that was repeated has the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.attacks import chaos_agent
from tests.attacks.chaos_program import POINTS
from tests.processes import command_line, descendants
from trainer.extras.ledger.ledger import read_lines, steps_in
from trainer.run.folder import RunFolder
from trainer.weight_sync.segment import HOLDER

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
STEPS = 6
ROUNDS_PER_RUN = 8
POINTS_BETWEEN = 16
"""A round that waits for a kind of point takes any after this many; a step has about 20."""
LATER_S = 0.5
STOPPED_S = 2.0
SILENT_S = 900.0
"""A run that reaches no point for this long hangs, also on a busy machine."""
KINDS = {
    "guard.py": "guard",
    "proxy serve": "proxy",
    "chaos_engine": "engine",
    "function_server": "agents",
    "multiprocessing": "rank",
    "chaos_program": "rank",
}
"""A part of a process's command line → what it is."""
TRAINER_KILLED = ("KILL", "trainer")
WEIGHTS = " ".join(HOLDER)
"""The command line of the process that holds the weights in memory."""


@dataclass(frozen=True, slots=True)
class Round:
    """Example: Round("an update is sent", "engine", "KILL", 0.0)"""

    point: str
    process: str
    how: str
    """KILL or STOP."""
    after_s: float
    """Seconds after the point; 0: while the run waits there."""


@dataclass
class Outcome:
    """What was done to a run, and what was seen."""

    rounds: list[Round] = field(default_factory=list)
    starts: int = 0
    ends: list[str] = field(default_factory=list)
    """The last line of each start that ended with an error by itself, with the last round."""
    faults: list[str] = field(default_factory=list)


def configure(folder: Path, ranks: int) -> Path:
    """Writes the configuration of the run `folder/run`; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [{"task_id": each, "prompt": f"Say {each}."} for each in "abcdef"]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in tasks))
    agent = Path(chaos_agent.__file__)
    settings = {
        "model": {"path": str(MODEL)},
        "data": {"train_files": [str(folder / "tasks.jsonl")]},
        "engine": {"verify": False, "verify_tolerance": 1e9, "restarts": 1000},
        "remote_agent": {
            "python": {"target": f"{agent}:run"},
            "grader": {"target": f"{agent}:grade"},
            "sandbox": "light without ports, processes, sockets",
            "timeout_s": 1800,
            "max_retries": 100,
        },
        "rollout": {"groups_per_step": 2, "group_size": 3},
        "algorithm": {"mini_batches": 2},
        "optimizer": {"lr": 1e-3},
        "trainer": {
            "run_dir": str(folder / "run"),
            "steps": STEPS,
            "ranks": ranks,
            "device": "cpu",
            "deterministic": True,
            "save_every": 1,
            "preflight_s": 0,
        },
        "logging": {"tensorboard": False, "progress": "plain"},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


class Program:
    """One start of the run."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._told, told = os.pipe()
        answered, self._answered = os.pipe()
        program = [sys.executable, "-m", "tests.attacks.chaos_program", str(told), str(answered)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*program, *words],
                stdout=output,
                stderr=output,
                pass_fds=(told, answered),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        os.close(told)
        os.close(answered)
        self._heard = b""

    def point(self) -> str | None:
        """The next point, at which the program now waits; None: it has ended.

        Raises TimeoutError: it has reached none within SILENT_S.
        """
        while b"\n" not in self._heard:
            if not select.select([self._told], [], [], SILENT_S)[0]:
                raise TimeoutError(f"no point was reached within {SILENT_S:.0f} s")
            if not (data := os.read(self._told, 4096)):
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().partition(" ")[2]

    def go_on(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._answered, b".")

    def processes(self) -> dict[int, str]:
        """Each process of the run → what it is."""
        found = {self.process.pid: "trainer"}
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in descendants(self.process.pid):
                line = command_line(pid)
                other = "weights" if line.strip() == WEIGHTS else line[:60] or "ended"
                found[pid] = next((kind for part, kind in KINDS.items() if part in line), other)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._told)
        os.close(self._answered)


def disturb(program: Program, point: str, rng: random.Random) -> Round:
    """One round, at the point at which the program waits; it goes on then."""
    after_s = rng.choice((0.0, rng.random() * LATER_S))
    if after_s:
        program.go_on()
        time.sleep(after_s)  # any moment of what follows
    found = program.processes()
    kind = rng.choice(sorted(set(found.values())))
    pid = rng.choice([pid for pid, each in found.items() if each == kind])
    how = rng.choice(("KILL", "STOP"))
    with contextlib.suppress(ProcessLookupError):
        if how == "KILL":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.random() * STOPPED_S)
            os.kill(pid, signal.SIGCONT)
    if not after_s:
        program.go_on()
    return Round(point, kind, how, after_s)


def chaos(folder: Path, ranks: int, rounds: int, rng: random.Random) -> Outcome:
    """One run to its end, with this many rounds, or fewer if it ends before."""
    outcome, config = Outcome(), configure(folder, ranks)
    log = folder / "said.log"
    awaited, left = rng.choice(list(POINTS.values())), POINTS_BETWEEN
    while True:
        begun = len(outcome.rounds)
        outcome.starts += 1
        again = ["resume", str(folder / "run")]
        resumes = (folder / "run" / "config.yaml").is_file() and rng.random() < 0.5
        program = Program(again if resumes else ["--config", str(config)], log)
        try:
            while (point := program.point()) is not None:
                left -= 1
                wanted = left <= 0 or (point == awaited)
                if not wanted or len(outcome.rounds) >= rounds:
                    program.go_on()
                    continue
                awaited, left = rng.choice(list(POINTS.values())), POINTS_BETWEEN
                outcome.rounds.append(disturb(program, point, rng))
            code = program.process.wait()
        except TimeoutError as error:
            outcome.faults.append(f"{error}, after {outcome.rounds[-1:]}")
            return outcome
        finally:
            program.end()
        if code == 0:
            return outcome
        done = outcome.rounds[begun:]
        if code == -signal.SIGKILL and done and (done[-1].how, done[-1].process) == TRAINER_KILLED:
            continue
        words = log.read_text(errors="replace").strip().splitlines()[-1:]
        outcome.ends.append(f"exit code {code} after {done}: {' '.join(words)[:300]}")
        if all(each.how != "KILL" for each in done):  # there is no reason to end
            outcome.faults.append(outcome.ends[-1])
            return outcome


def weights(folder: Path) -> list[str]:
    """The hash of the weights after each step, by the run's ledger."""
    lines = steps_in(read_lines(RunFolder(folder / "run").ledger))
    return [f"{line['step']} {line['policies']['']['weights']}" for line in lines]


def command(*words: str) -> tuple[int, str]:
    """The exit code of `agentic-train`, and what it said."""
    argv = [sys.executable, "-m", "trainer.cli", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def examine(folder: Path, undisturbed: Sequence[str]) -> list[str]:
    """What is wrong with a run that has ended."""
    found, ours = [], weights(folder)
    if ours != list(undisturbed):
        others = [ours for ours, theirs in zip(ours, undisturbed, strict=False) if ours != theirs]
        found.append(f"{len(ours)} steps, other weights from {others[:1]} on")
    code, said = command("audit", str(folder / "run"))
    if code:
        found.append(f"audit: {said.strip()[-500:]}")
    return found


def chaos_train(
    folder: Path, rounds: int, seed: int, ranks: int = 1, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Runs until there were this many rounds; the folders of runs with faults stay."""
    rng, outcomes = random.Random(seed), list[Outcome]()
    whole = chaos(folder / "undisturbed", ranks, 0, rng)
    if whole.ends or whole.faults:
        raise RuntimeError(f"the undisturbed run ended: {whole}")
    undisturbed = weights(folder / "undisturbed")
    assert len(undisturbed) == STEPS, undisturbed
    assert len({line.partition(" ")[2] for line in undisturbed}) == STEPS, "nothing is trained"
    left = rounds
    while left > 0:
        at = folder / f"run-{len(outcomes)}"
        outcome = chaos(at, ranks, min(ROUNDS_PER_RUN, left), rng)
        outcome.faults += examine(at, undisturbed) if not outcome.faults else []
        outcomes.append(outcome)
        left -= max(len(outcome.rounds), 1)
        say(f"seed {seed}: {rounds - left} of {rounds} rounds, {outcome.starts} starts")
        for line in (*outcome.ends, *(f"FAULT {each}" for each in outcome.faults)):
            say(f"  {at.name}: {line}")
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> str:
    rounds = [each for outcome in outcomes for each in outcome.rounds]
    counted = Counter(f"{each.how} {each.process}" for each in rounds)
    points = Counter(each.point for each in rounds)
    return (
        f"{len(rounds)} rounds in {len(outcomes)} runs with {sum(o.starts for o in outcomes)}"
        f" starts: {dict(counted)}; at {dict(points)}; {sum(len(o.ends) for o in outcomes)} ends"
        f" by an error; {sum(len(o.faults) for o in outcomes)} faults"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks.chaos_train", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the runs stay; default: nowhere")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-train-") as made:
        folder = given.folder or Path(made)
        outcomes = chaos_train(folder, given.rounds, given.seed, given.ranks)
    print(f"seed {given.seed}: {summary(outcomes)}")
    return int(any(outcome.faults for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
