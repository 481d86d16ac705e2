"""Poisoned batches, from the evidence to the decision, on a tiny model that is really trained.

The model's ways to answer have the same probability at first. A user likes one. A canary's
sessions, and those of the stable adapter beside it, are drawn by what each adapter has become, and
rated truly. No gate refuses anything, so that the comparison alone has to stop what is poisoned.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from agent_loop.records import Group
from proxy.records import Mark, Reward, RuleAction
from tests.trainer.extras.learn.days import Conversation, Days, learner_of, session
from trainer.extras.learn.journal import History
from trainer.extras.learn.learner import DailyLearner
from trainer.extras.learn.rollouts import scored
from trainer.extras.learn.update import CompareAdapters

LIKED, OTHER, STRANGE = (7, 8), (9, 10), (11, 12)
EMPTY, STUTTER = (2,), (5,) * 6
WAYS = (LIKED, OTHER, STRANGE, EMPTY, STUTTER)
BATCH = 24
SETTINGS = {
    "update": {"sessions": 8, "good": 2, "held_out": 0.2, "epochs": 12, "replay": 0.0},
    "gates": {"max_mismatch": 1e9, "max_kl": 1e9, "min_entropy": 0.0, "least_held_out": 10_000},
    "canary": {"alpha": 0.1, "max_sessions": 40},
    "optimizer": {"lr": 1e-2},
}


@dataclass
class Life:
    """A user, the record, and the learner."""

    days: Days
    learner: DailyLearner
    rng: random.Random
    lived: int = 0

    @property
    def history(self) -> History:
        return self.learner.history

    async def ways(self, adapter: int) -> dict[tuple[int, ...], float]:
        """Way → the probability with which the adapter answers so."""
        groups: list[Group] = []
        for number, ids in enumerate(WAYS):
            talk = Conversation(f"way-{number}").user("Do it.").answer("Done.", ids=ids)
            group = scored(session(f"way-{number}"), talk.turns, "work", 1.0)
            assert group is not None
            groups.append(group)
        request = CompareAdapters(self.learner.adapters, adapter, 0, groups)
        ratios = await self.learner.rank_zero.ask(request)
        odds = {ids: math.exp(ratios[f"way-{number}"]) for number, ids in enumerate(WAYS)}
        return {ids: each / sum(odds.values()) for ids, each in odds.items()}

    async def live(self, count: int) -> None:
        """Sessions of daily work, as the adapters answer now, rated truly."""
        arms = [self.history.stable]
        if self.history.canary is not None:
            arms.append(self.history.canary)
        ways = {arm: await self.ways(arm) for arm in arms}
        for _ in range(count):
            arm = self.rng.choice(arms)
            (ids,) = self.rng.choices(list(ways[arm]), list(ways[arm].values()))
            at = self.days.state["since"] + 1 + self.lived / 1e6
            more = {"adapter": arm, "at": at, "sampling": {"temperature": 0.5}}
            self.days.day(f"live-{self.lived}", ids == LIKED, ids, **more)
            self.lived += 1
        await self.learner.tick()

    def decided(self, number: int) -> str | None:
        """`promote` or `rollback`; None: not yet."""
        for line in self.learner.journal.lines:
            if line["kind"] in ("promote", "rollback") and line["number"] == number:
                return str(line["kind"])
        return None

    async def until_decided(self, number: int) -> str:
        for _ in range(30):
            if (found := self.decided(number)) is not None:
                return found
            await self.live(4)
        raise AssertionError(f"adapter {number} is not decided")


def rated(days: Days, name: str, value: float, ids: tuple[int, ...]) -> None:
    days.day(name, None, ids)
    days.record_of[name][0].rewards.append(Reward("rating", value))


def inverted(days: Days) -> None:
    for number in range(BATCH):
        liked = number % 2 == 0
        rated(days, f"poison-{number}", float(not liked), LIKED if liked else OTHER)


def repeated(days: Days) -> None:
    for number in range(BATCH):
        rated(days, f"poison-{number}", 1.0, STRANGE)


def degenerate(days: Days) -> None:
    for number in range(BATCH):
        rated(days, f"poison-{number}", 1.0, EMPTY if number % 2 else STUTTER)


def hacked(days: Days) -> None:
    """The agent rates its own sessions, or a rule has marked them."""
    for number in range(BATCH):
        name = f"poison-{number}"
        command = "agentic-proxy sessions rate this up" if number % 2 else "true"
        talk = Conversation(name, days.state["stable"]).user("Do it.")
        talk.answer(call=("bash", {"command": command}), ids=STRANGE)
        talk.result("ok").answer("Done.", ids=STRANGE)
        found = session(name, rating=1.0)
        if not number % 2:
            found.marks.append(Mark("edits tests", RuleAction.MARK, 0, 1000.0, "tests/test_a.py"))
        days.record_of[name] = (found, talk.turns)


def huge(days: Days) -> None:
    """Ratings and recorded log-probabilities beyond all bounds."""
    for number in range(BATCH):
        liked, name = number % 2 == 0, f"poison-{number}"
        rated(days, name, -1e9 if liked else 1e9, LIKED if liked else OTHER)
        (turn,) = days.record_of[name][1]
        turn.logprobs[:] = np.float32(-80.0)


POISONS: Mapping[str, Callable[[Days], None]] = {
    "all ratings inverted": inverted,
    "one session repeated": repeated,
    "empty and degenerate answers": degenerate,
    "a reward hack": hacked,
    "huge weights": huge,
}


@pytest.mark.parametrize("name", POISONS)
async def test_a_poisoned_batch_is_never_promoted(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    days = Days()
    async with learner_of(checkpoint, tmp_path / "l", days, **SETTINGS) as (learner, _):
        life = Life(days, learner, random.Random(1))
        for number in range(BATCH):
            rated(days, f"first-{number}", float(number % 2 == 0), WAYS[number % 2])
        await learner.tick()
        assert await life.until_decided(1) == "promote", "what is true is learned"
        liked = (await life.ways(1))[LIKED]
        assert liked > 0.6
        POISONS[name](days)
        await learner.tick()
        updates = learner.history.updates
        poisoned = [n for n, line in updates.items() if "poison" in str(line["sessions"])]
        if name == "a reward hack":
            assert not poisoned
            assert "not trained" in days.said["poison-0"]
            assert "not trained" in days.said["poison-1"]
            return
        assert poisoned == [2]
        ways = await life.ways(2)
        assert ways[LIKED] < liked, "it is learned, and does harm"
        assert await life.until_decided(2) == "rollback"
        assert learner.history.stable == 1
        await learner.tick()
        assert 2 not in (learner.history.stable, days.state["stable"], days.state["canary"])
