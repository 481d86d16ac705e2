"""`benchmarks/arms.py` reads when a run reached its goal, and with how many tokens."""

import json
from pathlib import Path

import pytest

from benchmarks.arms import Curve, Evaluation, Study, is_over, row, svg
from benchmarks.compaction.__main__ import STUDY as COMPACTION
from benchmarks.false_zeros import STUDY as FALSE_ZEROS
from benchmarks.top_p import STUDY as TOP_P
from trainer.settings.sources import load

WITH_GOAL = Study("any", {"neither": [], "prefix": [], "trees": []})


def test_goal_is_the_first_of_two_evaluations_in_a_row(tmp_path: Path) -> None:
    curve = _curve(tmp_path, [0.0, 0.9, 0.7, 0.8, 0.85])
    assert curve.reached(0.8) == Evaluation(step=6, tokens=600, success=0.8)
    assert "| 6 | 600 |" in row(WITH_GOAL, "trees", 0, curve)


def test_tokens_of_evaluations_are_not_counted(tmp_path: Path) -> None:
    curve = _curve(tmp_path, [0.0, 0.5])
    assert [(e.step, e.tokens) for e in curve.evaluations] == [(0, 0), (2, 200)]


def test_run_is_over_at_the_goal_or_at_the_last_step(tmp_path: Path) -> None:
    curve = _curve(tmp_path, [0.0, 0.9, 0.7])
    assert "not reached" in row(WITH_GOAL, "neither", 1, curve)
    assert not is_over(WITH_GOAL, curve, steps=5)
    assert is_over(WITH_GOAL, curve, steps=4)
    assert is_over(WITH_GOAL, _curve(tmp_path, [0.0, 0.9, 0.8]), steps=99)
    assert not is_over(WITH_GOAL, Curve.read(tmp_path / "none"), steps=1)


def test_run_without_a_goal_goes_on_to_its_last_step(tmp_path: Path) -> None:
    curve = _curve(tmp_path, [0.0, 0.9, 0.9])
    assert not is_over(COMPACTION, curve, steps=5)
    assert is_over(COMPACTION, curve, steps=4)


def test_image_has_a_line_per_run(tmp_path: Path) -> None:
    curve = _curve(tmp_path, [0.0, 1.0])
    image = svg(WITH_GOAL, {("neither", 0): curve, ("prefix", 0): curve})
    assert image.count("50.0,310.0 850.0,50.0") == 2
    assert "dashed: 0.8" in image
    assert "dashed" not in svg(COMPACTION, {("masked", 0): curve})


@pytest.mark.parametrize(
    ("study", "arm", "names"),
    [
        (COMPACTION, "masked", {"remote_agent.credit"}),
        (COMPACTION, "trained", set()),
        (COMPACTION, "no_limit", {"remote_agent.python"}),
    ],
)
def test_settings_of_an_arm_are_those_of_its_sections_only(
    study: Study, arm: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study.folder.parents[1])
    given, alone = load([study.config], list(study.arms[arm])), load([study.config])
    changed = {
        f"{part}.{name}"
        for part in ("rollout", "algorithm", "remote_agent")
        for name in type(getattr(given, part)).model_fields
        if getattr(getattr(given, part), name) != getattr(getattr(alone, part), name)
    }
    assert changed == names


def _curve(folder: Path, successes: list[float]) -> Curve:
    """A run with an evaluation before the first step and after every second one."""
    lines: list[dict] = []
    for number, success in enumerate(successes):
        steps = range(max(1, 2 * number - 1), 2 * number + 1)
        step = {"rollout/sampled_tokens": 100.0, "time/step_s": 1.0}
        lines += [{"step": number, **step} for number in steps]
        lines.append({"step": 2 * number, "eval/success": success})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Curve.read(folder)


@pytest.mark.parametrize("study", [COMPACTION, FALSE_ZEROS, TOP_P], ids=lambda each: each.name)
def test_each_arm_is_a_configuration(study: Study) -> None:
    for settings in study.arms.values():
        config = load([study.config], [*settings, "trainer.run_dir=r"])
        assert config.data.val_files
