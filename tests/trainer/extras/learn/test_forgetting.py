"""What is left after sessions were forgotten: what did harm, ages, numbers, gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.extras.learn.days import Days, learner_of
from tests.trainer.extras.learn.test_learner import BAD, GOOD, kinds, week
from trainer.extras.learn.journal import History, Journal
from trainer.extras.learn.learner import DailyLearner
from trainer.extras.learn.rebuild import RebuildError, check_forgetting, forget, proven


async def _order(days: Days, learner: DailyLearner, order: str) -> None:
    days.state["order"] = order
    await learner.tick()


async def _promoted(days: Days, learner: DailyLearner, count: int = 4) -> None:
    """An adapter of a first week, which a person promotes."""
    week(days, "first", count)
    await learner.tick()
    await _order(days, learner, "promote")


async def test_what_did_harm_stays_set_aside_and_numbers_are_not_used_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A batch is rolled back by a person; then a session of its parent, and one of its own, are
    forgotten, each by itself."""
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        await _promoted(days, learner)
        for number in range(4):
            days.day(f"poison-{number}", True, BAD, adapter=0)
        await learner.tick()
        await _order(days, learner, "rollback")
        harmful = learner.history.set_aside
        assert harmful == {f"poison-{number}" for number in range(4)}
        del days.record_of["first-1"]
        done = await forget(learner, {"first-1"})
        assert (done.rebuilt, done.dropped) == ({1: 3}, (2,))
        assert learner.history.set_aside == harmful
        del days.record_of["poison-0"]
        await forget(learner, {"poison-0"})
        assert learner.history.set_aside == harmful - {"poison-0"}
        assert learner.history.tried >= {"first-0", "poison-1"}
        week(days, "second")
        await learner.tick()  # publishes adapter 3, and the next one
        update = learner.history.updates[4]
        assert not harmful & {*update["sessions"], *update["replayed"]}
        assert set(days.published) == {1, 2, 3, 4}


async def test_number_of_a_forgotten_adapter_is_not_used_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        week(days, "first")
        await learner.tick()
        await _order(days, learner, "rollback")
        del days.record_of["first-0"]
        done = await forget(learner, {"first-0"})
        assert (done.rebuilt, done.dropped) == ({}, (1,))
        week(days, "second")
        await learner.tick()
        assert learner.history.canary == 2
        assert set(days.published) == {1, 2}
    assert History.of(Journal(tmp_path / "l").lines).last == 2


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
async def test_sessions_that_a_rebuilt_adapter_sampled_are_as_old_as_the_one_in_its_place(
    times: int, checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        await _promoted(days, learner, 6)
        for number in range(3):
            days.day(f"later-{number}", True, GOOD)
        await learner.tick()
        for number in range(times):
            del days.record_of[f"first-{number}"]
            await forget(learner, {f"first-{number}"})
        assert learner.history.stable == 1 + times
        assert learner.history.ages(1 + times) == dict.fromkeys(range(1, 2 + times), 0) | {0: 1}
        days.day("one-more", True, GOOD)
        await learner.tick()
        trained = learner.history.updates[2 + times]
        assert set(trained["sessions"]) == {"later-0", "later-1", "later-2", "one-more"}
        assert not trained["left_out"]


async def test_adapters_of_other_settings_are_not_computed_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    days, names = Days(), {"first-0"}
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        await _promoted(days, learner)
    changed: dict[str, Any] = {"optimizer": {"lr": 3e-2}, "temperature": 0.9}
    async with learner_of(checkpoint, tmp_path / "l", days, **changed) as (learner, _):
        said = r"adapter 1 was made with other values of optimizer\.lr, temperature"
        with pytest.raises(RebuildError, match=said):
            await proven(learner)
        with pytest.raises(RebuildError, match=said):
            check_forgetting(learner, names)
        before = list(learner.journal.lines)
        with pytest.raises(RebuildError, match=said):
            await forget(learner, names)
        assert learner.journal.lines == before
        check_forgetting(learner, {"of no adapter"})


async def test_a_rebuilt_adapter_passes_its_gates_or_its_parent_serves(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days) as (learner, _):
        await _promoted(days, learner)
        del days.record_of["first-1"]
        await forget(learner, {"first-1"})
        (gate,) = [line for line in learner.journal.lines if line["kind"] == "gate"]
        assert gate["number"] == 2
        kl = gate["measures"]["kl"]
    gates = {"max_mismatch": 100.0, "max_kl": kl / 2}
    async with learner_of(checkpoint, tmp_path / "l", days, gates=gates) as (learner, _):
        await learner.tick()
        del days.record_of["first-3"]
        done = await forget(learner, {"first-3"})
        assert done.rebuilt == {2: 0}
        assert "gates.max_kl" in done.refused[3][0]
        assert learner.history.stable == 0
        assert learner.history.set_aside == {"first-0", "first-2"}
        assert not learner.adapters.path(3).exists()
        assert not learner.journal.batch_file(3).exists()
        await learner.tick()
        assert days.state["stable"] == 0
        assert "update" not in kinds(learner)
