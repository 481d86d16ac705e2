"""gpt-oss's vocabulary for the package `openai_harmony`, taken from the checkpoint.

Two distributions install that module: `openai-harmony`, which downloads the vocabulary when it is
first used, and vLLM's `oss-harmony`, which contains it. Which of them a machine has, or which one's
files are there if it has both, must make no difference, and a proxy must not need the internet. The
checkpoint's tokenizer has the same tokens; `openai_harmony` compares the digest of the file that is
written from them with that of the published vocabulary.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from proxy.rendering.byte_pairs import byte_alphabet
from proxy.rendering.tokenizer import Tokenizer

TOKENS = 199_998
"""The ids below this are sequences of bytes; the special tokens come after them."""
SPECIAL = {"<|start|>": 200_006, "<|end|>": 200_007, "<|call|>": 200_012}
"""Some of the special tokens, by which another family's vocabulary is recognised at once."""
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""The folder from which `openai_harmony` reads vocabularies instead of downloading them."""


@contextmanager
def harmony_vocabulary(tokenizer: Tokenizer) -> Iterator[None]:
    """While it is entered, `openai_harmony` finds gpt-oss's vocabulary. A folder that the user
    names in the environment is used as it is. Raises ValueError for another vocabulary."""
    if any(tokenizer.convert_tokens_to_ids(text) != number for text, number in SPECIAL.items()):
        raise ValueError("the tokenizer's special tokens are not those of gpt-oss")
    if VARIABLE in os.environ:
        yield
        return
    lines = _vocabulary(tokenizer)
    with TemporaryDirectory(prefix="agentic-harmony-") as folder:
        Path(folder, "o200k_base.tiktoken").write_bytes(lines)
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def _vocabulary(tokenizer: Tokenizer) -> bytes:
    """tiktoken's file: the bytes of each token in base64, and its id, in the order of the ids."""
    alphabet = byte_alphabet()
    tokens: list[bytes | None] = [None] * TOKENS
    for token, number in tokenizer.get_vocab().items():
        if number < TOKENS:
            tokens[number] = bytes(alphabet[character] for character in token)
    missing = tokens.count(None)
    if missing:
        raise ValueError(f"the tokenizer has no token for {missing} of gpt-oss's {TOKENS} ids")
    encoded = (base64.b64encode(token or b"") for token in tokens)
    return b"".join(b"%s %d\n" % (token, number) for number, token in enumerate(encoded))
