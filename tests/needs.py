"""What tests need besides Python. If it is missing, the test is skipped; in CI it fails.

`.ci/run` installs all of it. A machine can refuse namespaces and mounts even to root, so tests that
need them are skipped in CI, too: with `skipif` and a reason.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def needs(missing: str | None) -> pytest.MarkDecorator:
    """`missing` says what is missing and how to install it; None if it is installed."""
    return pytest.mark.needs(missing)


def skip_or_fail(missing: str, *, at_import: bool = False) -> NoReturn:
    """For fixtures and, `at_import`, whole modules."""
    if os.environ.get("CI"):
        pytest.fail(f"{missing} (in CI this is not skipped)")
    pytest.skip(missing, allow_module_level=at_import)
