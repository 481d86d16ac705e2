"""Qwen3's tokenizer, from the vocabulary in the package `dashscope`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from examples.starter_model.tokenizer import train_tokenizer

CONTROL_WORDS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
"""In the order of their ids, which follow those of the vocabulary's file."""
_TEXT = frozenset(CONTROL_WORDS[14:])
"""Control words that are text: `skip_special_tokens` does not hide them."""


def qwen_tokenizer(file: Path) -> Tokenizer:
    """Qwen3's tokenizer, from a file with a line `BASE64 RANK` for each token."""
    lines = (line.split() for line in file.read_bytes().splitlines())
    tokenizer = byte_pairs({base64.b64decode(token): int(rank) for token, rank in lines})
    splits = train_tokenizer([], 512)  # text as Qwen's tokenizers do
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(tokenizer, part, getattr(splits, part))
    for word in CONTROL_WORDS:
        token = AddedToken(word, special=word not in _TEXT, normalized=False)
        add = tokenizer.add_tokens if word in _TEXT else tokenizer.add_special_tokens
        add([token])
    return tokenizer


def byte_pairs(ranks: Mapping[bytes, int]) -> Tokenizer:
    """A tokenizer without rules for splitting, from the ids of its tokens' bytes."""
    spelled = _letters_of_bytes()

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    merges = [_parts(token, ranks) for token in ranks if len(token) > 1]
    return Tokenizer(BPE(vocabulary, [(spell(one), spell(two)) for one, two in merges]))


def _letters_of_bytes() -> list[str]:
    """Byte-level BPE spells each byte as a visible letter: 0x20 as `Ġ`."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return [chr(byte if byte in visible else 0x100 + others.index(byte)) for byte in range(0x100)]


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that are merged into this one: what merges of lower ranks leave of it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(one + two, len(ranks)) for one, two in pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
