"""`agentic-train sweep`: which runs it makes, how it goes on, and what its table says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.run_files.intervals import change_of_means, mean_interval
from trainer.cli import main
from trainer.commands.sweep import Outcome, outcome_of, sweep, table, trials_of
from trainer.errors import ConfigError
from trainer.settings.values import Sources


def test_every_combination_is_a_run_and_seeds_are_last() -> None:
    words = ["seed=0..1", "optimizer.lr=1e-4,5e-4", "optimizer.betas=[0.9,0.95]", "trainer.steps=3"]
    trials, fixed = trials_of(words)
    assert [trial.name for trial in trials] == [
        *("lr=1e-4,seed=0", "lr=1e-4,seed=1", "lr=5e-4,seed=0", "lr=5e-4,seed=1"),
    ]
    assert trials[0].values == {"optimizer.lr": "1e-4", "trainer.seed": "0"}
    assert fixed == ["optimizer.betas=[0.9,0.95]", "trainer.steps=3"]


def test_lists_mappings_and_quoted_values_are_not_cut() -> None:
    trials, fixed = trials_of(
        ["algorithm.loss={name: ppo, clip_low: 0.1},{name: gspo}", "a.b='x,y'", "c=-2..-1"]
    )
    losses = [trial.values["algorithm.loss"] for trial in trials]
    assert losses[::2] == ["{name: ppo, clip_low: 0.1}", "{name: gspo}"]
    assert [trial.values["c"] for trial in trials[:2]] == ["-2", "-1"]
    assert fixed == ["a.b='x,y'"]
    assert all("/" not in trial.name and " " not in trial.name for trial in trials)


def test_keys_with_one_last_name_keep_their_whole_names() -> None:
    trials, _ = trials_of(["model.path=a/x,a/y", "data.path=1,2"])
    assert trials[0].name == "model.path=a-x,data.path=1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lr=1e-4"], "no key has several values"),
        (["optimizer.lr"], "expected key=value"),
        (["optimizer.lr=1,1"], "the same value twice"),
        (["model.path=a/b,a-b"], "name the same folder"),
        (["seed=0..1", "trainer.run_dir=x"], "a folder of its own"),
        (["seed=0..5000"], "more than 1000 runs"),
        (["seed=0..99", "optimizer.lr=1,2,3,4,5,6,7,8,9,10,11"], "more than 1000 runs"),
    ],
)
def test_what_cannot_be_swept_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        trials_of(words)


class Runs:
    """Stands for `agentic-train`: writes what a run leaves."""

    def __init__(self) -> None:
        self.called: list[list[str]] = []
        self.codes: list[int] = []
        """Of the next runs; then 0."""

    def __call__(self, words: Sequence[str]) -> int:
        self.called.append(list(words))
        code = self.codes.pop(0) if self.codes else 0
        if words[0] == "resume":
            folder = Path(words[1])
        else:
            folder = Path(words[-1].removeprefix("trainer.run_dir="))
            folder.mkdir()
            (folder / "config.yaml").write_text("{}")
        score = {"success": 0.5, "tasks": 8}
        done = {"status": "done", "eval": {"before": score, "after": score | {"success": 0.75}}}
        summary = done if code == 0 else {"status": "stopped" if code >= 128 else "failed"}
        (folder / "summary.json").write_text(json.dumps(summary))
        return code


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    words = ["seed=0..2", "trainer.steps=3"]
    return argparse.Namespace(config=[Path("a.yaml")], words=words, out=tmp_path / "out", ray=None)


def test_an_interrupted_sweep_goes_on_where_it_was(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = Runs(), arguments.out
    runs.codes = [0, 130]
    assert sweep(arguments, runs) == 130
    assert "the same command continues" in capsys.readouterr().out
    begin = ["--config", "a.yaml", "trainer.steps=3"]
    assert runs.called == [
        [*begin, "trainer.seed=0", f"trainer.run_dir={out}/seed=0"],
        [*begin, "trainer.seed=1", f"trainer.run_dir={out}/seed=1"],
    ]
    runs.called.clear()
    assert sweep(arguments, runs) == 0
    assert runs.called[0] == ["resume", f"{out}/seed=1"]
    assert runs.called[1][-1] == f"trainer.run_dir={out}/seed=2"
    assert len(runs.called) == 2
    said = capsys.readouterr().out
    assert "[2/3] seed=1" in said
    assert "all      3     0.500   0.750 [0.750, 0.750]" in said


def test_the_command_understands_what_a_sweep_says_to_it(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command itself, only what trains is replaced."""
    runs, resumed = Runs(), []
    runs.codes = [130]
    arguments.config[0] = arguments.out.parent / "a.yaml"
    arguments.config[0].write_text("{}")

    def begin(sources: Sources) -> int:
        return runs([f"trainer.run_dir={sources.values['trainer']['run_dir']}"])

    def resume(folder: Path, sources: Sources) -> int:
        resumed.append((folder, sources.paths))
        return runs(["resume", str(folder)])

    monkeypatch.setattr("trainer.start.begin", begin)
    monkeypatch.setattr("trainer.start.resume", resume)
    assert sweep(arguments, main) == 130
    assert sweep(arguments, main) == 0
    first = arguments.out / "seed=0"
    assert resumed == [(first, [first / "config.yaml"])]
    assert sorted(path.name for path in arguments.out.glob("seed=*")) == [
        *("seed=0", "seed=1", "seed=2"),
    ]


@pytest.mark.parametrize("words", [["resume"], ["resume", "trainer.steps=3"]])
def test_resume_asks_for_the_folder_that_it_was_not_given(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "give the run's folder" in capsys.readouterr().err


def test_a_run_that_fails_does_not_end_the_sweep(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()
    runs.codes = [1]
    assert sweep(arguments, runs) == 1
    assert len(runs.called) == 3
    assert capsys.readouterr().out.splitlines()[-1].split()[-1] == "1"
    assert outcome_of(arguments.out / "seed=0").status == "failed"
    assert sweep(arguments, runs) == 0


def test_settings_are_compared_with_the_first_over_their_seeds() -> None:
    trials, _ = trials_of(["seed=0..2", "optimizer.lr=1e-4,5e-4"])
    after = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    outcomes = {
        trial.name: Outcome("done", 0.1, value, 64)
        for trial, value in zip(trials, after, strict=True)
    }
    _, first, second = table(trials, outcomes).splitlines()
    assert first.split() == ["lr=1e-4", "3", "0.100", "0.600", "[0.352,", "0.848]"]
    assert second.split()[-3:] == ["+0.300", "[+0.073,", "+0.527]"]


def test_a_single_run_has_the_interval_of_its_tasks() -> None:
    trials, _ = trials_of(["optimizer.lr=1e-4,5e-4"])
    outcomes = {trials[0].name: Outcome("done", None, 0.5, 64), trials[1].name: Outcome("missing")}
    _, first, second = table(trials, outcomes).splitlines()
    assert first.split() == ["lr=1e-4", "1", "0.500", "[0.381,", "0.619]"]
    assert second.split() == ["lr=5e-4", "1", "1"]


def test_intervals_of_two_values_are_those_of_students_t() -> None:
    low, high = mean_interval([0.0, 1.0])
    assert high == pytest.approx(0.5 + 12.7062 * 0.5, abs=1e-3)
    assert low == pytest.approx(1 - high)
    _, (low, high) = change_of_means([0.0, 1.0], [0.0, 1.0])
    assert high == pytest.approx(4.3027 * 0.5**0.5, abs=1e-3)
