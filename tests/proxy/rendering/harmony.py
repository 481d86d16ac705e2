"""gpt-oss's own tokenizer, whose vocabulary its renderer uses for every checkpoint."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, load_harmony_encoding

from proxy.rendering.byte_pairs import byte_alphabet
from proxy.rendering.tokenizer import Tokenizer

TOKENS = 199_998
"""The ids below this are sequences of bytes."""
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


@cache
def vocabulary() -> dict[str, int]:
    """Each token as tokenizer.json has it, one character for each byte, and its id."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    tokens = (_encoding()._inner.decode_bytes([number]) for number in range(TOKENS))
    words = ("".join(characters[byte] for byte in token) for token in tokens)
    return {word: number for number, word in enumerate(words)}


def write_harmony_tokenizer(checkpoint: Path) -> None:
    """Gives the checkpoint gpt-oss's tokens. It has no merges, so texts become bytes."""
    special = {"<|start|>": 200_006, "<|end|>": 200_007, "<|return|>": 200_002}
    special |= {"<|message|>": 200_008, "<|channel|>": 200_005, "<|constrain|>": 200_003}
    special |= {"<|call|>": 200_012}
    special |= {f"<|unused_{n}|>": n for n in range(TOKENS, 200_013) if n not in special.values()}
    model = {"type": "BPE", "vocab": vocabulary() | special, "merges": []}
    described = json.loads((checkpoint / "tokenizer.json").read_bytes())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described["added_tokens"] = [
        {"id": number, "content": text, "special": True, **flags}
        for text, number in sorted(special.items(), key=lambda item: item[1])
    ]
    tokens = described | {"model": model}
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokens))


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

    def get_vocab(self) -> dict[str, int]:
        return vocabulary()

    def convert_ids_to_tokens(self, ids: int | list[int]) -> Any:
        return [self.decode(token) for token in ids] if isinstance(ids, list) else self.decode(ids)
