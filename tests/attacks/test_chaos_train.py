"""A short chaos; a long one is `python -m tests.attacks.chaos_train --rounds 100`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.attacks.chaos_train import chaos_train, summary


@pytest.mark.slow
@pytest.mark.parametrize("seed", [random.randrange(10**6)], ids=["random-seed"])
@pytest.mark.long
def test_run_ends_with_the_weights_of_an_undisturbed_one_whatever_is_killed(
    tmp_path: Path, seed: int
) -> None:
    outcomes = chaos_train(tmp_path, 3, seed)
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    assert not faults, f"seed {seed}: {summary(outcomes)}: {faults}"
