"""A canary gives way to one that has learned more: what comes between the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.client import ProxyClientError
from tests.trainer.extras.learn.days import Days, learner_of
from tests.trainer.extras.learn.test_learner import BAD, compare, kinds, week
from trainer.extras.learn.learner import DailyLearner
from trainer.extras.learn.update import UpdateAdapter

LITTLE = {"alpha": 0.01, "max_sessions": 12}


async def with_canary(learner: DailyLearner, days: Days) -> None:
    """A canary of which two compared sessions say little."""
    week(days, "first")
    await learner.tick()
    await compare(days, learner, [True, False])
    assert learner.history.canary == 1


class During:
    """A rank 0 beside whose updates something happens."""

    def __init__(self, rank_zero: Any, happens: Callable[[], None]) -> None:
        self._rank_zero, self._happens = rank_zero, happens

    async def ask(self, request: Any) -> Any:
        found = await self._rank_zero.ask(request)
        if isinstance(request, UpdateAdapter):
            self._happens()
        return found


@pytest.mark.parametrize("order", ["promote", "rollback", "freeze"])
async def test_what_a_person_orders_meanwhile_counts(
    order: str, checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary=LITTLE) as (learner, _):
        await with_canary(learner, days)
        rank_zero: Any = During(learner.rank_zero, lambda: days.order(order, 5.0, "ann"))
        learner.rank_zero = rank_zero
        week(days, "second")
        await learner.tick()
        found = {
            line["number"]: line for line in learner.journal.lines if line["kind"] == "rollback"
        }
        assert found[2]["by"] == "interrupted"
        await learner.tick()
        expected = {"promote": (1, 3), "rollback": (0, 3), "freeze": (0, 1)}
        assert (learner.history.stable, learner.history.canary) == expected[order]
        if order != "freeze":
            assert "second-0" in learner.history.updates[3]["sessions"]


async def test_sessions_of_an_update_that_lost_the_recorder_are_new_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary=LITTLE) as (learner, _):
        await with_canary(learner, days)
        away = list[str]()

        async def gone(policy: str) -> Any:
            away.append(policy)
            raise ProxyClientError("503", 503)

        def happens() -> None:
            monkeypatch.setattr(learner.recorder, "assignment", gone)

        rank_zero: Any = During(learner.rank_zero, happens)
        learner.rank_zero = rank_zero
        week(days, "second")
        with pytest.raises(ProxyClientError):
            await learner.tick()
        assert len(away) == 1
        monkeypatch.undo()
        learner.rank_zero = rank_zero._rank_zero
        await learner.tick()
        second = [f"second-{number}" for number in range(len(days.record_of))]
        made = learner.history.updates
        assert [n for n in made if set(second) & set(made[n]["sessions"])] == [2, 3]
        assert (learner.history.canary, learner.history.pending) == (3, None)


async def test_a_recorder_that_is_away_for_a_call_costs_no_canary(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary=LITTLE) as (learner, _):
        await with_canary(learner, days)
        say, away = days.say, list[str]()

        async def flaky(policy: str, name: str, text: str) -> None:
            if "rollback by newer" in text and not away:
                away.append(name)
                raise ProxyClientError("503", 503)
            await say(policy, name, text)

        monkeypatch.setattr(days, "say", flaky)
        week(days, "second")
        with pytest.raises(ProxyClientError):
            await learner.tick()
        await learner.tick()
        assert away
        assert learner.history.canary == days.state["canary"] == 2


async def test_a_learner_that_is_killed_between_the_two_lines_has_a_canary(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary=LITTLE) as (learner, _):
        await with_canary(learner, days)
        write = learner._write

        def killed(kind: str, **more: Any) -> None:
            if more.get("by") == "newer":
                raise KeyboardInterrupt
            write(kind, **more)

        monkeypatch.setattr(learner, "_write", killed)
        week(days, "second")
        with pytest.raises(KeyboardInterrupt):
            await learner.tick()
    async with learner_of(checkpoint, tmp_path / "l", days, canary=LITTLE) as (learner, _):
        await learner.tick()
        assert learner.history.canary == days.state["canary"] == 2


async def test_what_a_living_canary_has_learned_is_not_set_aside(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, canary=LITTLE) as (learner, _):
        await with_canary(learner, days)
        strict = learner.config.gates.model_copy(update={"max_kl": 1e-9})
        learner.config = learner.config.model_copy(update={"gates": strict})
        week(days, "second")
        await learner.tick()
        assert learner.history.set_aside == {f"second-{number}" for number in range(4)}


async def test_bad_evidence_without_a_weight_makes_no_update(
    checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    update = {"sessions": 4, "held_out": 0.0, "epochs": 2, "bad": 0.0}
    async with learner_of(checkpoint, tmp_path / "l", days, update=update) as (learner, _):
        for number in range(12):
            days.day(f"bad-{number}", False, BAD)
        await learner.tick()
        assert kinds(learner) == ["begin"]
