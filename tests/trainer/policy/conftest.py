"""Fixtures of the tests of the policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.policy.float64 import in_float64


@pytest.fixture
def exact() -> Iterator[None]:
    """Everything is computed in float64."""
    with in_float64():
        yield
