"""The text on which trainer and engines are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from trainer.weight_sync.probe import probe_ids


@pytest.mark.parametrize("begin", ["<|endoftext|>", None])
def test_probe_begins_with_the_token_that_begins_a_text(tmp_path: Path, begin: str | None) -> None:
    checkpoint = write_checkpoint(tmp_path)
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": begin}))
    tokenizer = load_tokenizer(checkpoint)
    expected = tokenizer.encode((begin or "") + "two numbers")
    assert probe_ids(checkpoint, "two numbers").tolist() == expected
    assert (tokenizer.decode(expected[:1]) == begin) == (begin is not None)
