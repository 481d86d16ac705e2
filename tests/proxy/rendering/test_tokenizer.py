"""The tokenizer remembers texts, and nobody can tell."""

from __future__ import annotations

from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import ENTRY_CHARS, RecentTexts

LONG = "Let me look at the file, then say what it holds. Été naïve 数学 done. <|im_end|> " * 5


def test_text_is_encoded_the_same_again(rendering: Rendering) -> None:
    tokenizer = rendering.tokenizer
    first = tokenizer.encode(LONG)
    expected = tokenizer.fast.encode(LONG, add_special_tokens=False).ids
    assert first == expected
    first.clear()
    assert tokenizer.encode(LONG) == expected


def test_what_is_remembered_is_bounded_and_the_latest() -> None:
    texts = RecentTexts(limit_chars=10 + 2 * ENTRY_CHARS)
    texts.put("aaaa", [1])
    texts.put("bbbb", [2])
    texts.get("aaaa")
    texts.put("cccc", [3])
    texts.put("cccc", [3])
    assert len(texts) == 8 + 2 * ENTRY_CHARS
    assert texts.get("bbbb") is None
    assert [list(texts.get(t) or ()) for t in ("aaaa", "cccc")] == [[1], [3]]
    texts.put("d" * 1000, [4])
    assert len(texts) == 0
