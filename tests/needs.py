"""What a test needs beside Python: where it is missing the test is skipped, and in CI it fails.

`.ci/run` installs all of it. Only what a machine can refuse to root (namespaces, mounts) is
skipped in CI, too: `skipif` with its reason, where it is used.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def needs(missing: str | None) -> pytest.MarkDecorator:
    """`missing`: what is not there and how to get it; None where it is there."""
    return pytest.mark.needs(missing)


def skip_or_fail(missing: str, *, at_import: bool = False) -> NoReturn:
    """For fixtures and, `at_import`, whole modules."""
    if os.environ.get("CI"):
        pytest.fail(f"{missing} (in CI this is not skipped)")
    pytest.skip(missing, allow_module_level=at_import)
