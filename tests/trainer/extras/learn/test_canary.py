"""The sequential test of a canary, against its stated errors."""

from __future__ import annotations

import random

import pytest

from trainer.extras.learn.canary import Comparison, evidence_against

ALPHA, MAX_PAIRS = 0.1, 40


def decided(rng: random.Random, canary: float, stable: float) -> tuple[str, int]:
    """The verdict on a canary with this success, and after how many pairs it falls."""
    ours: list[bool] = []
    theirs: list[bool] = []
    while True:
        ours.append(rng.random() < canary)
        theirs.append(rng.random() < stable)
        verdict = Comparison(ours, theirs).verdict(ALPHA, MAX_PAIRS)
        if verdict != "undecided":
            return verdict, len(ours)


def test_the_evidence_is_the_integral() -> None:
    for won, lost in ((0, 0), (5, 0), (3, 2), (0, 4), (60, 40)):
        steps = 200_000
        mesh = ((k + 0.5) / steps for k in range(steps))
        exact = sum((1 + x) ** won * (1 - x) ** lost for x in mesh) / steps
        assert evidence_against(won, lost) == pytest.approx(exact, rel=1e-6)
    assert evidence_against(5, 0) == pytest.approx((2**6 - 1) / 6)


def test_it_is_a_supermartingale_where_the_canary_is_not_better() -> None:
    for won, lost in ((0, 0), (4, 1), (2, 9)):
        next_ = (evidence_against(won + 1, lost) + evidence_against(won, lost + 1)) / 2
        assert next_ == pytest.approx(evidence_against(won, lost))


@pytest.mark.parametrize(("canary", "stable"), [(0.2, 0.2), (0.5, 0.5), (0.4, 0.6), (0.8, 0.8)])
def test_a_canary_that_is_not_better_is_promoted_no_more_often_than_stated(
    canary: float, stable: float
) -> None:
    rng = random.Random(0)
    promoted = sum(decided(rng, canary, stable)[0] == "promote" for _ in range(400))
    assert promoted / 400 <= ALPHA + 0.04


def test_a_worse_canary_is_gone_after_the_stated_number_of_pairs() -> None:
    rng = random.Random(0)
    found = [decided(rng, 0.1, 0.8) for _ in range(300)]
    assert {verdict for verdict, _ in found} == {"rollback"}
    assert max(pairs for _, pairs in found) <= MAX_PAIRS
    assert sum(pairs for _, pairs in found) / 300 < 12


def test_a_much_better_canary_is_promoted_soon() -> None:
    rng = random.Random(0)
    found = [decided(rng, 0.8, 0.2) for _ in range(300)]
    assert sum(verdict == "promote" for verdict, _ in found) / 300 > 0.97
    assert sum(pairs for _, pairs in found) / 300 < 12


def test_one_more_look_changes_no_earlier_verdict() -> None:
    canary, stable = [True] * 6 + [False] * 30, [False] * 6 + [True] * 30
    assert Comparison(canary, stable).verdict(0.1, 100) == "promote"
    assert Comparison(stable, canary).verdict(0.1, 100) == "rollback"
