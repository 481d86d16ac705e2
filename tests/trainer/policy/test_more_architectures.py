"""Architectures that are not in the table of docs/models.md and are trained, too."""

from __future__ import annotations

import pytest

from tests.trainer.policy.architectures import Architecture
from tests.trainer.policy.table import reason

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["afmoe", "helium"])
def test_architecture_is_trained(kind: str) -> None:
    """afmoe views the output of attention, and the width of helium is heads times head size."""
    assert reason(Architecture(kind, kind)) == ""
