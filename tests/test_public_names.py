"""What the packages export: every listed name exists, and there is one version."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("package", ["proxy", "agent_loop", "trainer", "harbor_sdk"])
def test_every_listed_name_exists_and_no_other(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert module.__version__ == importlib.import_module("proxy").__version__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
