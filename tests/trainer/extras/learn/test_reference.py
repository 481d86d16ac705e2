"""The generated page of the keys of learn.yaml."""

from __future__ import annotations

from pathlib import Path

from trainer.extras.learn.reference import page

WRITTEN = Path(__file__).parents[4] / "docs/learn_keys.md"


def test_the_page_is_generated() -> None:
    command = "python -m trainer.extras.learn.reference > docs/learn_keys.md"
    assert WRITTEN.read_text(encoding="utf-8") == page(), f"run: {command}"
