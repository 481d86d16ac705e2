"""The sequential test of a canary, against its stated errors."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.extras.learn.canary import Compared, Comparison

ALPHA, MAX_SESSIONS = 0.1, 80
GOOD = (1.0, 0.0)
"""How often each of two ways to do the work goes well."""


def decided(
    rng: random.Random,
    canary: float,
    stable: float,
    *,
    well: Sequence[float] = GOOD,
    share: float = 0.5,
    knows: bool = True,
) -> tuple[str, int]:
    """The verdict on a canary that chooses the first way with this probability, and the number of
    sessions after which it falls. `knows`: whether probabilities of sessions are known."""
    found: list[Compared] = []
    for _ in range(MAX_SESSIONS):
        by_canary = rng.random() < share
        way = 0 if rng.random() < (canary if by_canary else stable) else 1
        ratio = (canary / stable, (1 - canary) / (1 - stable))[way]
        log_ratio = math.log(ratio) if knows else None
        found.append(Compared(rng.random() < well[way], by_canary, log_ratio))
    verdict = Comparison(found, share).verdict(ALPHA, MAX_SESSIONS)
    return verdict, bisect_left(
        range(MAX_SESSIONS), True, key=lambda n: is_decided(found[:n], share)
    )


def is_decided(found: Sequence[Compared], share: float) -> bool:
    return Comparison(found, share).verdict(ALPHA, MAX_SESSIONS) != "undecided"


def test_the_evidence_is_the_integral() -> None:
    rng = random.Random(0)
    found = [Compared(rng.random() < 0.5, rng.random() < 0.5, rng.gauss(0, 2)) for _ in range(30)]
    mesh = (np.arange(20_000) + 0.5) / 20_000
    product, seen, went_well = np.ones_like(mesh), 1.0, 0.5
    for each in found:
        ratio = math.exp(each.log_ratio or 0.0)
        weight, mean = (ratio - 1) / (ratio + 1), went_well / seen
        product *= 1 + mesh * weight * (each.well - mean) / max(mean, 1 - mean)
        seen, went_well = seen + weight**2, went_well + each.well * weight**2
    assert Comparison(found, 0.5).better == pytest.approx(product.mean(), rel=1e-6)


@given(
    canary=st.lists(st.floats(0.01, 1), min_size=2, max_size=5),
    stable=st.lists(st.floats(0.01, 1), min_size=5, max_size=5),
    well=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    share=st.floats(0.05, 0.95),
    before=st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(-3, 3)), max_size=4),
    knows=st.booleans(),
)
def test_its_mean_falls_if_the_canary_is_not_better(
    canary: list[float],
    stable: list[float],
    well: list[float],
    share: float,
    before: list[tuple[bool, bool, float]],
    knows: bool,
) -> None:
    """The exact expectation of the next session's evidence, over who samples it, what is sampled
    and how it goes: a supermartingale, whatever came before."""
    ways = range(len(canary))
    ours = np.array(canary) / sum(canary)
    theirs = np.array(stable[: len(canary)]) / sum(stable[: len(canary)])
    past = [Compared(*each) for each in before]
    is_better = sum((ours[w] - theirs[w]) * well[w] for w in ways) > 0
    mean = 0.0
    for by_canary, of_adapter in ((True, share), (False, 1 - share)):
        for way in ways:
            ratio = math.log(ours[way] / theirs[way]) if knows else None
            for went_well, of_way in ((True, well[way]), (False, 1 - well[way])):
                found = Comparison([*past, Compared(went_well, by_canary, ratio)], share)
                evidence = found.worse if is_better else found.better
                mean += of_adapter * (ours if by_canary else theirs)[way] * of_way * evidence
    first = Comparison(past, share)
    assert mean <= (first.worse if is_better else first.better) * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize(
    ("canary", "stable", "well"),
    [
        (0.2, 0.7, (0.5, 0.5)),
        (0.2, 0.7, (0.9, 0.9)),
        (0.4, 0.6, GOOD),
        (0.5, 0.5, GOOD),
        (0.8, 0.2, (0.3, 0.35)),
    ],
)
def test_a_canary_that_is_not_better_is_promoted_no_more_often_than_stated(
    canary: float, stable: float, well: Sequence[float], share: float, *, knows: bool
) -> None:
    rng = random.Random(0)
    promoted = sum(
        decided(rng, canary, stable, well=well, share=share, knows=knows)[0] == "promote"
        for _ in range(200)
    )
    assert promoted / 200 <= ALPHA + 0.05


def test_a_worse_canary_is_gone_after_the_stated_number_of_sessions() -> None:
    rng = random.Random(0)
    found = [decided(rng, 0.1, 0.8, knows=False) for _ in range(200)]
    assert {verdict for verdict, _ in found} == {"rollback"}
    assert max(sessions for _, sessions in found) <= MAX_SESSIONS
    assert sum(sessions for _, sessions in found) / 200 < 20


def test_a_better_canary_is_promoted_sooner_if_the_probabilities_are_known() -> None:
    rng = random.Random(0)
    mean = {}
    for knows in (True, False):
        found = [decided(rng, 0.6, 0.2, knows=knows) for _ in range(200)]
        assert sum(verdict == "promote" for verdict, _ in found) / 200 > 0.9
        mean[knows] = sum(sessions for _, sessions in found) / 200
    assert mean[True] < 14
    assert mean[True] < mean[False] / 2


def test_two_adapters_that_do_the_same_tell_nothing() -> None:
    found = [Compared(bool(n % 3), bool(n % 2), 0.0) for n in range(50)]
    assert Comparison(found, 0.5).better == pytest.approx(1.0)


def test_one_more_look_changes_no_earlier_verdict() -> None:
    won = [Compared(True, True, 9.0), Compared(False, False, -9.0)] * 6
    lost = [Compared(False, True, 9.0), Compared(True, False, -9.0)] * 20
    assert Comparison(won, 0.5).verdict(0.1, 200) == "promote"
    assert Comparison(won + lost, 0.5).verdict(0.1, 200) == "promote"
    assert Comparison(lost + won, 0.5).verdict(0.1, 200) == "rollback"


def test_a_ratio_beyond_all_bounds_counts_as_who_sampled_it() -> None:
    for by_canary, ratio in ((True, 1e6), (False, -1e6)):
        known = Compared(True, by_canary, ratio).weight(0.5)
        assert known == pytest.approx(Compared(True, by_canary).weight(0.5))
