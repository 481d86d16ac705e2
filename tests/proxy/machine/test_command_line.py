"""No garbage is collected while a program imports, and it is again afterwards."""

from __future__ import annotations

import gc
from importlib import import_module

import pytest

from proxy.machine.command_line import importing


def test_no_garbage_is_collected_during_imports() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError), importing():
        import_module("no_such_module")
    assert gc.isenabled()
