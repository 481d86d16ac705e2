"""The page of GPUs is what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fits
from trainer.policy.rank_memory import GIB

PAGE = Path(__file__).parents[2] / "docs/gpus.md"


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-8B"])
def test_rows_of_the_page_are_those_of_the_plan(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    command = "generate it again: python -m benchmarks.fits --page > docs/gpus.md"
    assert text.startswith(fits.PAGE), command
    assert text.endswith(fits.BELOW), command
    for way in ("all weights", "LoRA, rank 16, in bfloat16"):
        cells = [fits.recomputed(fits.MODELS[name], way, gib * GIB) for gib in fits.CARDS.values()]
        assert f"| {name} | {way} | {' | '.join(cells)} |\n" in text, command
