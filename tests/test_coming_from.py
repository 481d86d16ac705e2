"""docs/coming_from.md names keys, classes and functions that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from proxy.config import ProxyConfig
from trainer.config import TrainerConfig
from trainer.settings.sources import keys_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("proxy", "agent_loop", "trainer", "harbor_sdk")
KEYS = {key.dotted for model in (TrainerConfig, ProxyConfig) for key in keys_of(model)}
SECTIONS = {key.partition(".")[0] for key in KEYS}
OF_A_RUN = {"trainer.log", "sessions.db"}
# Names of modules whose first part is also the name of a section.
PYTHON = re.compile(r"(trainer|agent_loop|proxy)\.[a-z_.]+\.[A-Za-z]\w*")


def quoted() -> Iterator[str]:
    """What stands in backticks in the last column of each table."""
    for line in (ROOT / "docs/coming_from.md").read_text().splitlines():
        if line.startswith("| "):
            yield from re.findall(r"`([^`]+)`", line.split(" | ", 1)[1])


def names(pattern: str) -> list[str]:
    found = sorted({name for name in quoted() if re.fullmatch(pattern, name)})
    assert found, pattern
    return found


def is_key(name: str) -> bool:
    """`train_sources.NAME.function` is a key for any NAME."""
    return name in KEYS or re.sub(r"\.NAME\..*", "", name) in KEYS


@pytest.mark.parametrize("name", names(r"[a-z_]+(\.[A-Za-z_]+)+(: .*)?"))
def test_dotted_name_is_a_key_or_can_be_imported(name: str) -> None:
    key = name.partition(":")[0]
    if key in OF_A_RUN:
        return
    if PYTHON.fullmatch(key) and key not in KEYS:
        module, _, attribute = key.rpartition(".")
        assert hasattr(import_module(module), attribute)
    elif key.partition(".")[0] in SECTIONS:
        assert is_key(key), key
    else:
        assert (ROOT / "docs" / name).exists(), name
