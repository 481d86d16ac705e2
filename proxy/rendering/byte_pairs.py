"""Byte-level BPE with `tiktoken`, five times as fast as `tokenizers`, if both provably agree.

Invariant: `faster` returns an encoder only if, for the given tokenizer.json, every text that the
encoder accepts (`BytePairs.encode` is not None) has the same ids as with `tokenizers`. This follows
from

- the same pieces: there is no normalisation except NFC (texts that are not in NFC are left to
  `tokenizers`), the text contains no added token, and one pattern splits it, for which the results
  of both were compared on samples of every kind of character;
- the same merges: tiktoken merges any two adjacent parts whose concatenation is a token, the lowest
  id first; `tokenizers` merges the pairs in its list, in the list's order. The ids must be in that
  order, and every token must be the result of merging its own bytes. Two adjacent parts that form a
  token are then a pair in the list: the merges inside their bytes are the same, and the last merge
  can only be that of the two parts.

Both decode ids to the same bytes, those of the tokens one after the other, and replace each maximal
part of them that is not UTF-8 by one character (results are compared on the same samples).
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import orjson
import tiktoken
from tokenizers import Tokenizer as FastTokenizer

MAX_CHARS = 100_000
"""tiktoken's pattern engine fails on texts of some million white spaces. Longer texts are encoded
in a thread anyway."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The default pattern of `ByteLevel`."""
_PLAIN_MODEL = {
    "type": "BPE",
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
    "ignore_merges": False,
}


class BytePairs:
    """The encoder of one vocabulary. Example: faster(tokenizer).encode("Hello.")"""

    def __init__(
        self, encoding: tiktoken.Encoding, added: Sequence[str], longest_token_bytes: int
    ) -> None:
        self._encode = encoding.encode_ordinary
        self._decode_bytes = encoding.decode_bytes
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._longest_token_bytes = longest_token_bytes

    def least_tokens(self, text: str) -> int:
        """A lower bound on the text's number of tokens, much cheaper than encoding it.

        A token has at most the bytes of the vocabulary's longest token, and a character has at
        least one byte. Returns 0 if that proves nothing, because normalisation may shorten the
        text or an added token may absorb white space.
        """
        bound = -(-len(text) // self._longest_token_bytes)
        composed = text.isascii() or unicodedata.is_normalized("NFC", text)
        return bound if composed and not self._added.search(text) else 0

    def encode(self, text: str) -> list[int] | None:
        """The ids; None for a text that `tokenizers` must encode."""
        if len(text) > MAX_CHARS or self._added.search(text):
            return None
        if not text.isascii() and not unicodedata.is_normalized("NFC", text):
            return None
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str | None:
        """The text, with replacement characters for bytes that are not UTF-8; None for ids that
        `tokenizers` must decode: those of added tokens, and unknown ones."""
        try:
            return self._decode_bytes(ids).decode(errors="replace")
        except (KeyError, OverflowError):
            return None


_FOUND: dict[bytes, BytePairs | None] = {}
"""Digest of a tokenizer's file → its faster encoder: a process that loads it again needs no other
proof."""


def faster(fast: FastTokenizer) -> BytePairs | None:
    """The faster encoder; None if the two are not proven to agree."""
    text = fast.to_str()
    digest = sha256(text.encode() + bytes([fast.encode_special_tokens])).digest()
    if digest not in _FOUND:
        _FOUND[digest] = _proven(fast, orjson.loads(text))
    return _FOUND[digest]


def _proven(fast: FastTokenizer, config: dict[str, Any]) -> BytePairs | None:
    pattern = _pattern(config["pre_tokenizer"])
    ranks = _ranks(fast, config["model"], config["added_tokens"])
    if pattern is None or ranks is None or config["normalizer"] not in (None, {"type": "NFC"}):
        return None
    if (config["decoder"] or {}).get("type") != "ByteLevel":
        return None
    try:
        encoding = tiktoken.Encoding(
            "model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
        )
    except ValueError:  # a pattern that tiktoken does not support
        return None
    added = [token["content"] for token in config["added_tokens"]]
    found = BytePairs(encoding, added, max(map(len, ranks)))
    return found if all(_agree(found, fast, text) for text in _samples()) else None


def _agree(found: BytePairs, fast: FastTokenizer, text: str) -> bool:
    ids = found.encode(text)
    if ids is None:
        return True
    if ids != fast.encode(text, add_special_tokens=False).ids:
        return False
    broken = ids[::3] + ids[::-1]  # characters without some of their bytes
    return all(found.decode(each) == fast.decode(each, False) for each in (ids, broken))


def _samples() -> Iterable[str]:
    """Every 23rd character of the Basic Multilingual Plane and some others, in varied contexts."""
    points = [*range(1, 0xD800, 23), *range(0xE000, 0x10000, 23), *range(0x1F300, 0x1F700, 23)]
    for start in range(0, len(points), 64):
        chars = (chr(point) for point in points[start : start + 64])
        text = "".join(f"{c}{c} a{c} {c}'S 12{c}\n\n {c}, \t{c}\r\n" for c in chars)
        yield unicodedata.normalize("NFC", text)


def _pattern(pre: Mapping[str, Any] | None) -> str | None:
    """The splitting pattern of a `ByteLevel`, alone or after one `Split`; None for others."""
    if pre is None:
        return None
    steps: Sequence[Mapping[str, Any]] = (
        pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    )
    if steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"] or len(steps) > 2:
        return None
    if len(steps) == 1:
        return _GPT2 if steps[0]["use_regex"] else None
    split = steps[0]
    plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
    found = split["pattern"].get("Regex") if plain and not steps[1]["use_regex"] else None
    return found if isinstance(found, str) else None


def _ranks(
    fast: FastTokenizer, model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]
) -> dict[bytes, int] | None:
    """Each token's bytes and id; None if the merges are not in order of id or miss a token."""
    if any(model.get(name) != value for name, value in _PLAIN_MODEL.items()):
        return None
    vocab: dict[str, int] = model["vocab"]
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    merged = [left + right for left, right in merges]
    ids = [vocab.get(token, -1) for token in merged]
    in_order = all(a < b for a, b in itertools.pairwise(ids))
    alphabet = byte_alphabet()
    special = {token["content"] for token in added}
    if not in_order or not alphabet.keys() <= vocab.keys():
        return None
    if vocab.keys() - special != alphabet.keys() | set(merged):
        return None
    if not all(len(fast.model.tokenize(token)) == 1 for token in merged):
        return None
    return {
        bytes(alphabet[char] for char in token): token_id
        for token, token_id in vocab.items()
        if token not in special
    }


def byte_alphabet() -> dict[str, int]:
    """The characters for bytes in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}
