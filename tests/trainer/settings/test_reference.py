"""Every key of the configuration is documented and used, and the page of keys is up to date, those
of every extra, too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from proxy.engines.registry import ENGINES
from proxy.store import STORES
from trainer.algorithms.advantages import ADVANTAGES
from trainer.algorithms.aggregation import AGGREGATIONS
from trainer.algorithms.correction import REJECTIONS, WEIGHTS
from trainer.algorithms.kl import ESTIMATORS
from trainer.algorithms.policy_losses import LOSSES
from trainer.algorithms.presets import PRESETS
from trainer.settings.reference import Page, reference
from trainer.settings.sources import Key

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"
USERS = ("tests/**/*.py", "examples/**/*", "benchmarks/**/*", "agentic_trainer.yaml")
KEYS_OF = Page()
ALL_KEYS = [*KEYS_OF.run, *KEYS_OF.proxy]
LISTED = [key for key in ALL_KEYS if KEYS_OF.lists(key)]
KEYS = [key for key in LISTED if "." in key.path or not key.sections]
"""Every key but the sections at the top, which are the page's headings."""


@cache
def words_of_users() -> list[frozenset[str]]:
    """The words of each test, example and benchmark."""
    files = [path for pattern in USERS for path in ROOT.glob(pattern) if path.is_file()]
    return [
        frozenset(re.findall(r"\w+", path.read_bytes().decode(errors="replace")))
        for path in files
        if path.suffix != ".jsonl"
    ]


def names_of_section(key: Key) -> set[str]:
    """What a file calls the key's section: its name in a configuration, or a class with the key."""
    section, _, name = key.dotted.replace(".NAME", "").rpartition(".")
    if not section:
        return {"ProxyConfig", "load_config", "agentic-proxy", "proxy"}
    models = {model for each in ALL_KEYS if each.dotted == section for model in each.sections}
    classes = {
        cls.__name__
        for model in models
        for cls in model.__mro__
        if issubclass(cls, BaseModel) and name in cls.model_fields
    }
    return {section.rpartition(".")[2], *classes}


def test_page_of_keys_is_up_to_date_with_the_code() -> None:
    command = "python -m trainer.settings.reference > docs/configuration.md"
    assert PAGE.read_text() == reference(), f"generate it again: {command}"


def test_page_lists_what_several_sections_have_in_common_once() -> None:
    listed = re.findall(r"^- (?:\*\*)?`([^`]+)`(?:\*\*)? \(", PAGE.read_text(), re.MULTILINE)
    headings = re.findall(
        r"^<summary>([\w.]+): \d+ keys</summary>\n\n(?!- )", PAGE.read_text(), re.M
    )
    assert sorted([*listed, *headings]) == sorted(key.path for key in KEYS)
    definitions = [key.definition for key in LISTED]
    assert set(definitions) == {key.definition for key in ALL_KEYS}
    assert len(definitions) == len(set(definitions))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("data.val_sources", "Its keys are those of `data.train_sources`."),
        ("proxy_server.rules", "Its keys are those of `rules` of the proxy."),
        ("remote_agent.python", "Also `env`, `template`, as in `remote_agent.command`."),
        ("remote_agent.verifier.limits", "Its keys are those of `remote_agent.process.limits`."),
    ],
)
def test_section_says_where_the_keys_are_that_it_has_in_common(section: str, said: str) -> None:
    (line,) = re.findall(rf"^- \*\*`{re.escape(section)}`.*$", PAGE.read_text(), re.MULTILINE)
    assert line.endswith(said)


@pytest.mark.parametrize("heading", ["## model", "## rollout", "## remote_agent", "### limits"])
def test_section_begins_with_the_keys_that_people_set(heading: str) -> None:
    name = heading.split()[1]
    section = PAGE.read_text().partition(f"\n{heading}\n")[2].partition("\n#")[0]
    first, folded, _ = section.partition("<details")
    assert folded
    paths = re.findall(r"^- (?:\*\*)?`([^`]+)`", first, re.MULTILINE)
    marked = [key.path for key in KEYS if key.path.startswith(f"{name}.") and key.is_common]
    assert paths == marked
    assert 2 <= len(paths) <= 6


def test_every_key_is_documented_where_it_is_defined() -> None:
    bare = [key.path for key in KEYS if not key.text]
    assert bare == []


def test_every_key_is_used_with_its_section_in_a_test_an_example_or_a_benchmark() -> None:
    def is_used(key: Key) -> bool:
        name, section = key.dotted.rpartition(".")[2], names_of_section(key)
        return any(name in words and section & words for words in words_of_users())

    assert {key.dotted for key in KEYS if not is_used(key)} == set()


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("algorithm.advantage", ADVANTAGES.names),
        ("algorithm.loss", LOSSES.names),
        ("algorithm.aggregation", AGGREGATIONS.names),
        ("algorithm.kl.estimator", ESTIMATORS.names),
        ("algorithm.correction.weight", WEIGHTS.names),
        ("algorithm.correction.reject", REJECTIONS.names),
        ("algorithm.preset", PRESETS),
        ("engines.kind", ENGINES),
        ("proxy_server.renderer", ["auto", "template", "qwen3"]),
        ("store", STORES),
    ],
)
def test_line_of_a_key_lists_the_names_of_its_registry(key: str, names: Iterable[str]) -> None:
    (line,) = re.findall(rf"^- `{re.escape(key)}` .*$", PAGE.read_text(), re.MULTILINE)
    listed = line.partition("Names:")[2]
    assert [name for name in names if f"`{name}`" not in listed] == []
