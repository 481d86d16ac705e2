"""`agentic-train explain NAME`: what a setting, a metric, a verdict or a word of the glossary is.

A name that is not known is completed at its front: `clip_fraction`, `group_size`.
"""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Iterator

from proxy.config import ProxyConfig
from proxy.run_files.metric_table import ends_with, metric_groups, metric_lines, metric_of
from proxy.run_files.verdict import MEANINGS, Word
from proxy.run_files.word_table import advice, glossary
from trainer.commands.runs import reporting
from trainer.config import TrainerConfig
from trainer.errors import ConfigError
from trainer.settings.reference import key_line
from trainer.settings.sources import Key, keys_of

WIDTH = 100
MOST = 12
"""Entries that are shown of a name that many have."""


def main(arguments: argparse.Namespace) -> int:
    """Runs `agentic-train explain`; returns its exit code."""
    return reporting("agentic-train explain", lambda: _explain(arguments.names))


def _explain(names: list[str]) -> int:
    for name in names:
        for entry in explained(name):
            print("\n".join(textwrap.wrap(entry, WIDTH, subsequent_indent="    ")))
    return 0


def explained(name: str) -> list[str]:
    """What is known of the name: an entry for each thing that has it, or that ends with it.

    Raises ConfigError if nothing does; the message names what is like it.
    """
    keys = [*keys_of(TrainerConfig), *keys_of(ProxyConfig)]
    found = _exactly(name, keys) or _at_the_end(name, keys)
    if not found:
        metrics = (metric.name for group in metric_groups().values() for metric in group)
        like = difflib.get_close_matches(name, [*metrics, *(key.path for key in keys)])
        did_you_mean = f"; did you mean {' or '.join(like)}?" if like else ""
        raise ConfigError(
            f"{name!r} is no setting, metric, verdict or word of the glossary{did_you_mean}"
        )
    if len(found) > MOST:
        rest = f"and {len(found) - MOST} more: give more of the name"
        return [*found[:MOST], rest]
    return found


def _exactly(name: str, keys: list[Key]) -> list[str]:
    words = name.lower().replace("-", " ").replace("_", " ")
    found = [line for word in MEANINGS if word == words for line in _verdict(word)]
    found += [f"{word}: {text}" for word, text in glossary().items() if word.lower() == words]
    metric = metric_of(name)
    found += metric_lines(metric) if metric else ()
    return found + [key_line(key) for key in keys if key.path == name]


def _verdict(word: Word) -> Iterator[str]:
    known = advice()[word]
    yield f"{word} (verdict): {MEANINGS[word]}"
    yield f"  decided from: {known.decided}"
    yield f"  what may be behind it: {known.behind}"
    yield f"  look at: {known.look}"
    yield f"  then: {known.do}"


def _at_the_end(name: str, keys: list[Key]) -> list[str]:
    found = [line for metric in ends_with(name) for line in metric_lines(metric)]
    return found + [key_line(key) for key in keys if f".{key.path}".endswith(f".{name}")]
