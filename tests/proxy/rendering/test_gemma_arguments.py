"""Gemma 4's arguments as JSON: as the renderer reads them, and growing with the text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers.gemma4 import _ArgumentParser, _format_argument

from proxy.rendering.gemma_arguments import gemma_arguments

QUOTE = '<|"|>'
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda text: QUOTE not in text
)
_KEY = st.from_regex(r"[a-z_][a-z0-9_ -]{0,5}[a-z]", fullmatch=True)
_LEAF = _TEXT | st.integers(-(2**53), 2**53) | st.booleans() | st.none() | st.floats(-1e9, 1e9)
VALUES = st.recursive(
    _LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEY, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(_KEY, VALUES, max_size=4)
PIECES = st.sampled_from([QUOTE, "<|", '"', "{", "}", "[", "]", ",", ":", " ", "a", "1", "-", "é"])


def _whole(text: str) -> str:
    return gemma_arguments(text, unfinished=False)


@settings(deadline=None)
@given(ARGUMENTS)
def test_finished_arguments_are_those_that_the_renderer_reads(arguments: dict[str, Any]) -> None:
    text = _format_argument(arguments)
    assert orjson.loads(_whole(text)) == _ArgumentParser(text).parse()


@settings(deadline=None)
@given(ARGUMENTS.map(_format_argument) | st.lists(PIECES, max_size=30).map("".join))
def test_json_only_grows_while_the_text_grows(text: str) -> None:
    """Also if the text has mistakes: what was sent cannot be taken back."""
    if not text.startswith("{"):
        text = "{" + text
    sent = ""
    for end in range(1, len(text) + 1):
        begun = gemma_arguments(text[:end], unfinished=True)
        assert begun.startswith(sent)
        assert _whole(text[:end]).startswith(begun)
        sent = begun
    assert _whole(text).startswith(sent)


@pytest.mark.parametrize(
    ("text", "json"),
    [
        ("{}", "{}"),
        ("{a:1,b:tr", '{"a":1,"b":'),
        ('{a:<|"|>x\n<|', '{"a":"x\\n<|'),
        ("{a:NaN,b:12345678901234567890123}", '{"a":null,"b":12345678901234567890123}'),
        ("{a:word}", '{"a":"word"}'),
        ('{"a": "b"}', '{"\\"a\\"":"b"}'),
        ("{a b, c}", "{a b, c}"),
        ("{a:1} more", '{"a":1}'),
    ],
)
def test_unusual_arguments(text: str, json: str) -> None:
    assert _whole(text) == json
