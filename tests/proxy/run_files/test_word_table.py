"""The glossary and what is behind each verdict: complete, current, and true to the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.commands.word_reference import verdicts, words
from proxy.run_files.metric_table import metric_of
from proxy.run_files.verdict import Word
from proxy.run_files.word_table import advice, glossary

ROOT = Path(__file__).parents[3]
METRIC = re.compile(r"`((?:actor|group|rollout|reward)/[a-z_]+)`")
SETTING = re.compile(r"`((?:data|rollout|optimizer|algorithm)\.[a-z_.]+)(?:=[^`]*)?`")


@pytest.mark.parametrize(("name", "page"), [("verdicts", verdicts), ("glossary", words)])
def test_page_is_up_to_date(name: str, page: object) -> None:
    command = f"python -m proxy.commands.word_reference {name} > docs/{name}.md"
    assert callable(page)
    assert (ROOT / f"docs/{name}.md").read_text() == page(), f"generate it again: {command}"


def test_each_verdict_names_metrics_and_settings_that_exist() -> None:
    known = (ROOT / "docs/configuration.md").read_text()
    said = " ".join(" ".join(each) for each in advice().values())
    metrics, settings = set(METRIC.findall(said)), set(SETTING.findall(said))
    assert len(metrics) >= 5
    assert len(settings) >= 5
    assert [name for name in metrics if metric_of(name) is None] == []
    assert [name for name in settings if f"`{name}`" not in known] == []


def test_limits_are_those_by_which_a_verdict_is_decided() -> None:
    assert "20 % of the trials of the last 10 steps" in advice()[Word.FAILING].decided
    assert "15 steps or more" in advice()[Word.NOT_SEPARATING].decided


def test_words_are_in_order_and_each_is_a_sentence() -> None:
    entries = glossary()
    assert list(entries) == sorted(entries, key=str.lower)
    assert all(text[0].isupper() and text.endswith(".") for text in entries.values())
