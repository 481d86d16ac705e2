"""The verdict of a run, from folders as runs leave them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.run_files.evidence import RunRecord
from proxy.run_files.verdict import RunVerdict, VerdictJson, verdict_lines

GROUPS, SIZE = 4, 8


def write(
    folder: Path, steps: Iterable[Sequence[Sequence[float | None]]], *, error: str = "exit code 2"
) -> Path:
    """Writes the rewards of each step's groups; None is a failed trial."""
    folder.mkdir(exist_ok=True)
    with (folder / "trials.jsonl").open("a") as trials, (folder / "metrics.jsonl").open("a") as m:
        for step, groups in enumerate(steps, 1):
            for g, rewards in enumerate(groups):
                for n, reward in enumerate(rewards):
                    trials.write(json.dumps(line(step, f"g{step}-{g}", n, reward, error)) + "\n")
            judged = [each for group in groups for each in group if each is not None]
            if judged:
                values = {"step": step, "reward/mean": sum(judged) / len(judged)}
                m.write(json.dumps(values) + "\n")
    return folder


def line(step: int, group: str, n: int, reward: float | None, error: str) -> dict[str, Any]:
    failed = reward is None
    trial = f"{group}-{n}-AbPKSthLiic{n}"
    return {
        "step": step,
        "kind": "train",
        "group": group,
        "trial_id": trial,
        "task_id": group,
        "status": "failed" if failed else "done",
        "reward": reward,
        "error": f"{error}; see /a/trials/{trial}/agent.log" if failed else None,
    }


def evaluated(folder: Path, name: str, step: int, rewards: Iterable[float]) -> None:
    with (folder / "trials.jsonl").open("a") as trials:
        for n, reward in enumerate(rewards):
            task = {"step": step, "kind": "eval", "evaluation": name, "trial_id": f"e{n}-{name}"}
            task |= {"task_id": f"e{n}", "source": "s", "status": "done", "reward": reward}
            trials.write(json.dumps(task) + "\n")


def judged(folder: Path, **more: Any) -> VerdictJson:
    summary = more.pop("summary", {"status": "done"})
    evidence = RunRecord(folder, 1.0).read()
    return RunVerdict(folder, evidence, summary, more.pop("config", {}), **more).json()


def sampled(rng: random.Random, success: float) -> list[list[float | None]]:
    return [[float(rng.random() < success) for _ in range(SIZE)] for _ in range(GROUPS)]


def test_rising_rewards_are_learning(tmp_path: Path) -> None:
    rng = random.Random(1)
    found = judged(write(tmp_path / "r", [sampled(rng, 0.2 + n / 40) for n in range(24)]))
    assert found["verdict"] == "learning"
    (change,) = found["evidence"]
    assert change["low"] is not None
    assert 0 < change["low"] < change["value"]


def test_held_out_success_decides_over_noise_in_training(tmp_path: Path) -> None:
    rng = random.Random(2)
    folder = write(tmp_path / "r", [sampled(rng, 0.5) for _ in range(12)])
    evaluated(folder, "before", 0, [0.0] * 20 + [1.0] * 5)
    evaluated(folder, "after", 12, [1.0] * 20 + [1.0] * 5)
    found = judged(folder)
    assert found["verdict"] == "learning"
    assert "rose from 20 % to 100 %" in found["sentence"]


@pytest.mark.parametrize(("reward", "word"), [(0.0, "too hard"), (1.0, "already solved")])
def test_equal_rewards_are_too_hard_or_solved(tmp_path: Path, reward: float, word: str) -> None:
    found = judged(write(tmp_path / "r", [[[reward] * SIZE] * GROUPS] * 3))
    assert found["verdict"] == word
    assert found["evidence"][0]["of"] == 12
    assert (found["evidence"][0]["low"] or 0) > 0.5


def test_too_hard_names_the_ladder_with_commands(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [[[0.0] * SIZE] * GROUPS] * 3)
    commands = [each["command"] for each in judged(folder)["next"]]
    assert [each.split()[1] for each in commands[:2]] == ["collect", "sft"]
    assert any("rollout.group_size=32" in each for each in commands)
    assert all(str(folder) in each for each in commands)


def test_rewards_that_do_not_move_do_not_separate(tmp_path: Path) -> None:
    rng = random.Random(3)
    found = judged(write(tmp_path / "r", [sampled(rng, 0.5) for _ in range(30)]))
    assert found["verdict"] == "not separating"
    assert "noise" in found["cause"]


def test_tasks_that_are_always_or_never_solved_do_not_separate(tmp_path: Path) -> None:
    step = [[float(g % 2)] * SIZE for g in range(GROUPS)]
    found = judged(write(tmp_path / "r", [step] * 20))
    assert found["verdict"] == "not separating"
    assert "always solved or never" in found["cause"]


def test_a_fall_from_the_best_is_a_collapse(tmp_path: Path) -> None:
    rng = random.Random(4)
    course = [0.3] * 6 + [0.8] * 10 + [0.1] * 10
    folder = write(tmp_path / "r", [sampled(rng, each) for each in course])
    with (folder / "metrics.jsonl").open("a") as metrics:
        for n in range(26):
            metrics.write(json.dumps({"step": n + 1, "actor/entropy": 0.5 / (1 + n) ** 2}) + "\n")
    found = judged(folder)
    assert found["verdict"] == "collapsed"
    assert "entropy fell" in found["cause"]


def test_a_low_start_that_gets_lower_is_a_collapse_with_smaller_updates_next(
    tmp_path: Path,
) -> None:
    rng = random.Random(6)
    steps = [sampled(rng, 0.26 - n / 240) for n in range(48)]
    config = {"optimizer.lr": "0.0006"}
    found = judged(write(tmp_path / "r", steps), config=config)
    assert found["verdict"] == "collapsed"
    assert "between the first and the last steps" in found["sentence"]
    assert any("optimizer.lr=0.0002" in each["command"] for each in found["next"])


def test_held_out_success_decides_over_a_fall_in_training(tmp_path: Path) -> None:
    rng = random.Random(6)
    folder = write(tmp_path / "r", [sampled(rng, 0.35 - n / 100) for n in range(30)])
    assert judged(folder)["verdict"] == "collapsed"
    evaluated(folder, "before", 0, [0.0] * 20 + [1.0] * 5)
    evaluated(folder, "after", 30, [1.0] * 20 + [1.0] * 5)
    assert judged(folder)["verdict"] == "learning"


def test_failed_trials_are_grouped_with_the_last_lines_of_their_agent(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [[[None] * SIZE] * GROUPS])
    last = folder / "trials" / "g1-3-7-AbPKSthLiic7"
    last.mkdir(parents=True)
    (last / "agent.log").write_text("one\ntwo\n\nModuleNotFoundError: no module\n")
    found = judged(folder, summary={"status": "failed", "error": "ProductionError: no rollout"})
    assert found["verdict"] == "failing"
    assert found["cause"].startswith("exit code 2 (32 of 32 failed trials)")
    (failure,) = found["failures"]
    assert (failure["cause"], failure["trials"], failure["of"]) == ("exit code 2", 32, 32)
    assert failure["folder"] == str(last)
    assert failure["lines"] == ["one", "two", "ModuleNotFoundError: no module"]
    assert any("ModuleNotFoundError" in each for each in verdict_lines(found))
    json.dumps(found, allow_nan=False)


def test_failures_of_what_trials_run_on_are_starved(tmp_path: Path) -> None:
    error = "ProxyClientError: the proxy cannot be reached"
    found = judged(write(tmp_path / "r", [[[None] * SIZE, [1.0] * SIZE]], error=error))
    assert found["verdict"] == "starved"


def test_a_run_that_waits_for_its_first_trial_is_starved(tmp_path: Path) -> None:
    rng = random.Random(5)
    folder = write(tmp_path / "r", [sampled(rng, 0.5) for _ in range(3)])
    now = {"phase": "sampling", "started_at": 1000.0, "ended": 0}
    running = {"status": "running"}
    assert judged(folder, summary=running, now=now, at=1500.0)["verdict"] == "too early"
    assert judged(folder, summary=running, now=now, at=1700.0)["verdict"] == "starved"
    assert (
        judged(folder, summary=running, now=now | {"ended": 1}, at=1700.0)["verdict"] != "starved"
    )


def test_an_error_that_ended_the_run_is_its_cause(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", [])
    failed = {"status": "failed", "error": "KeyError: 'advantages'"}
    assert judged(folder, summary=failed)["cause"] == "KeyError: 'advantages'"
    assert judged(folder, summary={"status": "running"})["verdict"] == "too early"


def test_chance_alone_is_seldom_called_learning_or_a_collapse(tmp_path: Path) -> None:
    words = []
    for seed in range(60):
        rng = random.Random(seed)
        folder = write(tmp_path / str(seed), [sampled(rng, 0.4) for _ in range(30)])
        words.append(judged(folder)["verdict"])
    assert words.count("learning") <= 4  # 2.5 % of 60, and what chance adds
    assert words.count("collapsed") <= 4
    assert words.count("not separating") >= 52


def test_the_loss_of_a_fine_tuning_is_judged_and_its_checkpoint_is_next(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    losses = [{"step": n + 1, "sft/loss": 2.0 / (1 + n / 3)} for n in range(12)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in losses))
    found = judged(folder, config={"sft.sessions": "[]"})
    assert found["verdict"] == "learning"
    assert "checkpoints/step-000012/model" in found["next"][0]["command"]


@pytest.mark.parametrize(("steps", "word"), [(30, "not separating"), (0, "too early")])
def test_what_to_do_after_a_fine_tuning_is_a_fine_tuning(
    steps: int, word: str, tmp_path: Path
) -> None:
    """It has no groups and no rewards, and `trainer.steps` has no effect."""
    folder = tmp_path / "r"
    folder.mkdir()
    rng = random.Random(3)
    losses = [{"step": n + 1, "sft/loss": rng.uniform(0.4, 0.5)} for n in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in losses))
    found = judged(folder, config={"sft.sessions": "[]", "sft.epochs": "2"})
    assert found["verdict"] == word
    assert "groups" not in found["cause"]
    commands = [each["command"] for each in found["next"]]
    assert all(each.startswith("agentic-train sft --config") for each in commands)
    assert "sft.epochs=4" in commands[-1]


def test_a_record_read_in_pieces_or_after_a_restart_is_the_same(tmp_path: Path) -> None:
    rng = random.Random(6)
    steps = [sampled(rng, 0.2 + n / 40) for n in range(24)]
    whole = judged(write(tmp_path / "r", steps))
    folder = tmp_path / "r"
    trials = (folder / "trials.jsonl").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes())
    record = RunRecord(other, 1.0)
    half = len(trials) // 2  # within a line
    (other / "trials.jsonl").write_bytes(trials[:half])
    record.read()
    with (other / "trials.jsonl").open("ab") as file:
        file.write(trials[half:])
    evidence = record.read()
    assert evidence.trials == 24 * GROUPS * SIZE
    again = RunVerdict(other, evidence, {"status": "done"}, {}).json()
    assert again["sentence"] == whole["sentence"]
    cut = b"".join(trials.splitlines(keepends=True)[: GROUPS * SIZE])
    replaced = other / "new"
    replaced.write_bytes(cut)
    replaced.replace(other / "trials.jsonl")  # as a run that is resumed does
    assert record.read().trials == GROUPS * SIZE


def test_trials_that_limits_end_are_named_as_the_cause(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    lines = [
        line(step, f"g{step}-{g}", n, 0.0, "") | {"status": "truncated"}
        for step in (1, 2, 3)
        for g in range(GROUPS)
        for n in range(SIZE)
    ]
    (folder / "trials.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = judged(folder, config={"remote_agent.timeout_s": "120.0"})
    assert found["verdict"] == "too hard"
    assert "a limit ended 96 of 96 trials" in found["cause"]
    assert any("remote_agent.timeout_s=480" in each["command"] for each in found["next"])


def test_lines_that_another_program_wrote_are_judged_as_far_as_they_are_known(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    odd: list[Any] = [
        {"step": "1", "kind": 7, "status": ["failed"], "reward": 10**400, "sampled_tokens": "x"},
        {"step": 10**30, "kind": "train", "status": "done", "reward": True, "error": {"a": 1}},
        {"status": "failed", "kind": "train", "error": "a-" * 500_000 + "9"},
        {"kind": "eval", "status": "done", "reward": 1, "task_id": None},
        [1, 2],
    ]
    text = "".join(json.dumps(each) + "\n" for each in odd) + 'not json\n{"step": 2'
    (folder / "trials.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text('{"step": 3, "reward/mean": NaN}\n{"step": null}\n')
    json.dumps(judged(folder), allow_nan=False)
