"""Which classes of docs/models.md CI loads into a vLLM: one of those that are loaded alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ALIKE = {
    "Qwen 2.5",
    "Qwen 3",
    "Gemma 2",
    "Mistral",
    "GLM-4",
    "Granite 3",
    "SmolLM3",
    "OLMo 3",
    "Seed-OSS",
    "Cohere 2",
}
"""Dense classes whose weights vLLM names and stacks as Llama's: `make test-long` sends them."""


def representatives(titles: Iterable[str]) -> list[Any]:
    """The classes as parameters; those that are loaded as another one is are long."""
    return [pytest.param(each, marks=[pytest.mark.long] * (each in ALIKE)) for each in titles]


def chosen(session: pytest.Session, fixture: str, parameter: str) -> list[str]:
    """The values of a parameter in the tests of this session that use the fixture: what it is to
    compute."""
    tests = [each for each in session.items if isinstance(each, pytest.Function)]
    using = [each for each in tests if fixture in each.fixturenames]
    return sorted({str(each.callspec.params[parameter]) for each in using})
