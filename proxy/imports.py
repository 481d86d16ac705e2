"""Imports of large packages, without the garbage collections that take a sixth of their time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """For the imports of a program that begins.

    Example:
    with importing():
        import torch
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
