"""The page of keys says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import config
from trainer.config_reference import _docstrings, reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
SECTIONS = [
    value
    for value in vars(config).values()
    if isinstance(value, type)
    and issubclass(value, config.Section)
    and value not in (config.Section, config.TrainerConfig)
]


def test_the_page_is_the_one_that_the_code_makes() -> None:
    wanted = "python -m trainer.config_reference > docs/configuration.md"
    assert PAGE.read_text() == reference(), f"make it anew: {wanted}"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_is_documented_where_it_is_defined(section: type[config.Section]) -> None:
    documented = _docstrings(section)
    assert [name for name in section.model_fields if name not in documented] == []
