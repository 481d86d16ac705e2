"""What sessions share with each other is counted once."""

from __future__ import annotations

import numpy as np

from proxy.extras.schedule.openings import COMPARED, Openings
from proxy.records import Ids


def prompt(*parts: int) -> Ids:
    """100 tokens of each kind."""
    return np.repeat(np.array(parts, np.int32), 100)


def test_first_session_with_a_prefix_pays_for_it_and_later_ones_do_not() -> None:
    openings = Openings()
    openings.arrive("a", prompt(1, 2, 3))
    openings.arrive("b", prompt(1, 2, 4))
    assert openings.own("a", 500) == 500
    assert openings.own("b", 500) == 300


def test_only_the_first_call_of_a_session_is_compared() -> None:
    openings = Openings()
    openings.arrive("a", prompt(1, 2))
    openings.arrive("b", prompt(7))
    openings.arrive("b", prompt(1, 2))
    assert openings.own("b", 200) == 200


def test_session_that_is_forgotten_is_compared_again() -> None:
    openings = Openings()
    openings.arrive("a", prompt(1, 2))
    openings.forget("a")
    assert openings.own("a", 200) == 200
    openings.arrive("a", prompt(1, 2))
    assert openings.own("a", 200) == 0


def test_openings_that_are_mostly_shared_do_not_displace_the_others() -> None:
    openings = Openings()
    openings.arrive("first", prompt(1, 2, 3))
    for number in range(2 * COMPARED):
        openings.arrive(f"like-{number}", prompt(1, 2, 100 + number))
    openings.arrive("last", prompt(1, 2, 3))
    assert openings.own("last", 300) == 0
