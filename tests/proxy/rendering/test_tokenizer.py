"""The tokenizer's cache does not change its results."""

from __future__ import annotations

from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import RecentTexts

LONG = "Let me look at the file, then say what it holds. Été naïve 数学 done. <|im_end|> " * 5


def test_cached_text_has_the_same_ids(rendering: Rendering) -> None:
    tokenizer = rendering.tokenizer
    first = tokenizer.encode(LONG)
    expected = tokenizer.fast.encode(LONG, add_special_tokens=False).ids
    assert first == expected
    first.clear()
    assert tokenizer.encode(LONG) == expected


def test_what_is_remembered_is_bounded_and_the_latest() -> None:
    one = RecentTexts(limit_bytes=10_000)
    one.put("aaaa", [1])
    texts = RecentTexts(limit_bytes=4 * len(one) + 10)
    for text in ("aaaa", "bbbb", "cccc", "dddd"):
        texts.put(text, [1])
    texts.get("aaaa")
    texts.put("eeee", [2])
    texts.put("eeee", [2])
    assert len(texts) == 4 * len(one)
    assert texts.get("bbbb") is None
    assert [list(texts.get(t) or ()) for t in ("aaaa", "eeee")] == [[1], [2]]


def test_a_text_that_would_take_more_than_a_quarter_of_the_memory_is_not_kept() -> None:
    texts = RecentTexts(limit_bytes=4000)
    assert list(texts.put("d" * 100, [4] * 300)) == [4] * 300
    assert len(texts) == 0
