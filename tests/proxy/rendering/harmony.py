"""gpt-oss's own tokenizer, whose vocabulary its renderer uses for every checkpoint."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from proxy.rendering.tokenizer import Tokenizer

SPECIAL = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)


@cache
def _encoding() -> HarmonyEncoding:
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


class HarmonyTokenizer(Tokenizer):
    """A small checkpoint's tokenizer with gpt-oss's vocabulary."""

    def __init__(self, small: Tokenizer) -> None:
        super().__init__(**{f.name: getattr(small, f.name) for f in fields(Tokenizer)})
        self.pairs = None
        self.stop_token_ids = ()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _encoding().encode(text, allowed_special="all")

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        return _encoding().decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, list):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return self._encode(tokens, False)[0]

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        return [self.decode(token) for token in ids] if isinstance(ids, list) else self.decode(ids)
