"""The two encoders give the same ids, and the fast one is not used where they might differ."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from proxy.rendering.byte_pairs import MAX_CHARS, BytePairs, faster
from proxy.rendering.rendering import Rendering

words = st.sampled_from(
    [
        "the file",
        "The",
        "'S",
        "  ",
        "\r\n\n",
        "\t",
        "12345",
        "don't",
        "数学",
        "naïve",
        "e\u0301",
        "<|im_end|>",
        "\u2028",
        "\u00a0",
        "\u017f",
        "\U0001f600",
        "{'a': 1}",
        "----",
        "\x00",
    ]
)
texts = st.lists(words | st.text(max_size=5), max_size=30).map("".join)


@pytest.fixture(scope="module")
def fast(rendering: Rendering) -> Tokenizer:
    return rendering.tokenizer.fast


@pytest.fixture(scope="module")
def pairs(fast: Tokenizer) -> BytePairs:
    found = faster(fast)
    assert found is not None
    return found


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_both_encoders_produce_the_same_ids(fast: Tokenizer, pairs: BytePairs, text: str) -> None:
    ids = pairs.encode(text)
    known = fast.encode(text, add_special_tokens=False).ids
    assert ids is None or ids == known
    assert pairs.least_tokens(text) <= len(known)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_both_decode_ids_to_the_same_text(
    fast: Tokenizer, pairs: BytePairs, data: st.DataObject
) -> None:
    """Also ids that are not the whole of a character: the first tokens are single bytes."""
    size = fast.get_vocab_size(with_added_tokens=True)
    token = st.integers(0, 300) | st.integers(0, size - 1)
    ids = data.draw(st.lists(token, max_size=12))
    text = pairs.decode(ids)
    added = {fast.token_to_id(each.content) for each in fast.get_added_tokens_decoder().values()}
    assert (text is None) == (not added.isdisjoint(ids))
    assert text is None or text == fast.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("unknown", [-1, 10**6, 2**40])
def test_unknown_ids_are_not_decoded(pairs: BytePairs, unknown: int) -> None:
    assert pairs.decode([5, unknown]) is None


def test_only_ordinary_text_is_encoded(pairs: BytePairs) -> None:
    assert pairs.encode("Let me look: naïve 数学.") is not None
    for text in ("Say <|im_end|> now.", "e\u0301", " " * (MAX_CHARS + 1)):
        assert pairs.encode(text) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"decoder": None},
        {"model": {"ignore_merges": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
    ],
)
def test_tokenizer_that_may_differ_has_no_fast_encoder(
    fast: Tokenizer, changes: dict[str, Any]
) -> None:
    assert faster(_changed(fast, changes)) is None


def test_merges_must_be_in_order_of_id_and_reach_every_token(fast: Tokenizer) -> None:
    model = orjson.loads(fast.to_str())["model"]
    first, second, *rest = model["merges"]
    assert faster(_changed(fast, {"model": {"merges": [second, first, *rest]}})) is None
    assert faster(_changed(fast, {"model": {"merges": [first, second, *rest[:-1]]}})) is None


def _changed(fast: Tokenizer, changes: dict[str, Any]) -> Tokenizer:
    config = orjson.loads(fast.to_str())
    for name, value in changes.items():
        if name == "model":
            config["model"].update(value)
        elif isinstance(value, dict) and value["type"] == "ByteLevel":
            config[name] = {**value, "trim_offsets": True}
        else:
            config[name] = value
    return Tokenizer.from_str(orjson.dumps(config).decode())
