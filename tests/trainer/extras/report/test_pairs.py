"""Which trials a report puts next to each other."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from proxy.extras.view.run_folder import RecordedRun
from proxy.rendering.rendering import Rendering
from proxy.run_files.trial_files import TrialFiles
from proxy.store import open_store
from tests.proxy.conftest import StartProxy
from tests.trainer.extras.report.written import report_data, trial, write_run
from trainer.extras.report.transcripts import VERIFIER_BYTES, Transcripts, verifier_output

BEFORE_AND_AFTER = {"same": (1, 1), "worse": (1, 0), "b": (0, 1), "a": (0, 1), "c": (0, 1)}


def pairs_of(path: Path, count: int, trials: list[dict[str, Any]]) -> dict[str, Any]:
    config = {"model": {"path": "m"}, "logging": {"report_trials": count}}
    return report_data(write_run(path, trials=trials, config=config))


def evaluated() -> list[dict[str, Any]]:
    return [
        trial(task, step, float(rewards[n]))
        for n, step in enumerate((0, 9))
        for task, rewards in BEFORE_AND_AFTER.items()
    ]


def test_solved_tasks_come_first_then_one_that_got_worse_then_others(tmp_path: Path) -> None:
    titles = {}
    for count in (0, 1, 3, 9):
        data = pairs_of(tmp_path / str(count), count, evaluated())
        titles[count] = [pair["title"] for pair in data["pairs"]]
    a, b, c = (f"{name}: failed before, solved after" for name in "abc")
    worse, same = "worse: solved before, failed after", "same: solved before and after"
    assert titles == {0: [], 1: [a], 3: [a, b, worse], 9: [a, b, c, worse, same]}


def test_sides_are_the_trials_of_the_two_evaluations(tmp_path: Path) -> None:
    data = pairs_of(tmp_path / "run", 3, evaluated())
    sides = data["pairs"][0]["sides"]
    assert [(side["label"], side["trial"]["trial_id"]) for side in sides] == [
        ("at step 0", "a-0"),
        ("at step 9", "a-9"),
    ]
    assert [side["left_out"] for side in sides] == ["The run has no sessions.db."] * 2
    assert data["pairs_note"].startswith("Of the held-out tasks, 3 got better, 1 got worse, and 1")


def test_rollouts_of_the_last_group_with_different_rewards_are_shown(tmp_path: Path) -> None:
    def rollout(step: int, reward: float, group: str, name: str) -> dict[str, Any]:
        return trial("t", step, reward, kind="train", group=group, trial_id=name)

    trials = [rollout(3, 0.0, "g1", "low"), rollout(3, 1.0, "g1", "high")]
    trials += [rollout(3, 0.5, "g1", "middle")]
    trials += [rollout(4, 1.0, "g2", name) for name in ("x", "y")]
    (pair,) = pairs_of(tmp_path / "run", 3, trials)["pairs"]
    assert [side["trial"]["trial_id"] for side in pair["sides"]] == ["low", "high"]
    assert pair["title"].startswith("Training, step 3, t")


async def test_note_says_where_the_prompts_of_two_trials_part(
    start_proxy: StartProxy, rendering: Rendering, tmp_path: Path
) -> None:
    proxy = await start_proxy()
    sessions = []
    for folder in ("one", "two", "two"):
        sessions.append(await proxy.session())
        system = {"role": "system", "content": f"You are brief. CWD: /trials/{folder}/work. Go."}
        body = {"messages": [system, {"role": "user", "content": "Hello."}]}
        assert (await proxy.post(sessions[-1], "chat/completions", body))[0] == 200
    one, two, same = (session.trial_id for session in sessions)
    store = await open_store(f"sqlite:///{tmp_path}/proxy.db", create=False)
    run = RecordedRun(write_run(tmp_path / "run").path)
    transcripts = Transcripts(run, store.browser, rendering.tokenizer)
    said = await transcripts.parting(one, two)
    assert re.match(r"Their first prompts share \d+ of \d+ tokens and part at ", said)
    assert "/trials/one" in said
    assert "/trials/two" in said
    assert "You are brief" not in said
    assert await transcripts.parting(two, same) == ""
    assert await transcripts.parting(one, "unknown") == ""
    assert await Transcripts(run, None, rendering.tokenizer).parting(one, two) == ""
    await store.close()


def test_failed_trials_are_no_sides(tmp_path: Path) -> None:
    trials = [trial("t", 0, 0.0), trial("t", 9, None, status="failed"), trial("u", 9, 1.0)]
    assert pairs_of(tmp_path / "run", 3, trials)["pairs"] == []


def test_folder_of_a_trial_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "reward.txt").write_text("1")
    trial = tmp_path / "trials" / "t-1"
    trial.mkdir(parents=True)
    (trial / "reward").symlink_to(tmp_path / "elsewhere")
    assert verifier_output(TrialFiles(tmp_path / "trials", "t-1")) == []
    (trial / "reward").unlink()
    (tmp_path / "elsewhere").rename(trial / "reward")
    assert verifier_output(TrialFiles(tmp_path / "trials", "t-1"))


def test_output_of_the_verifier_is_read_from_the_trials_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "trials"
    (folder / "t-1" / "reward").mkdir(parents=True)
    (folder / "t-1" / "verifier.log").write_bytes(b"x" * 10_000 + b"\xff end")
    (folder / "t-1" / "reward" / "reward.txt").write_text("0.5\n")
    (folder / "t-1" / "grader.log").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "t-1" / "graded.json")
    (tmp_path / "verifier.log").write_text("outside")
    log, reward = verifier_output(TrialFiles(folder, "t-1"))
    assert log["name"] == "verifier.log"
    assert log["text"].endswith("x� end")
    assert len(log["text"]) < VERIFIER_BYTES + 100
    assert reward == {"name": "reward/reward.txt", "text": "0.5"}
    others = ("..", "", "t-2", "../trials/t-1")
    assert [verifier_output(TrialFiles(folder, name)) for name in others] == [[]] * 4
