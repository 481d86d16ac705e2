"""What an adapter must fulfil before it serves anybody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.extras.learn.config import Gates
from trainer.extras.learn.gates import Measures, as_json, refusals

FINE = Measures(kl=0.01, entropy=0.9, mismatch=1e-7, held_out=5, gain=0.02, loss_rise=-0.1)


def changed(name: str, value: Any) -> Measures:
    return replace(FINE, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("kl", 0.5, "max_kl"),
        ("entropy", 0.01, "min_entropy"),
        ("mismatch", 0.2, "max_mismatch"),
        ("gain", -0.1, "least_gain"),
        ("loss_rise", 0.2, "max_loss_rise"),
    ],
)
def test_each_bound_refuses_alone_and_so_does_what_is_no_number(
    name: str, value: float, key: str
) -> None:
    assert refusals(FINE, Gates()) == []
    for bad in (value, float("nan")):
        (why,) = refusals(changed(name, bad), Gates())
        assert f"gates.{key}=" in why
    assert as_json(changed(name, float("nan")))[name] is None


def test_few_held_out_sessions_decide_nothing() -> None:
    assert refusals(replace(FINE, held_out=2, gain=-1.0, loss_rise=9.0), Gates()) == []
