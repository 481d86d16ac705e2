"""gpt-oss's vocabulary comes from the checkpoint, whichever package of harmony is installed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from proxy.config import RenderingConfig
from proxy.errors import ConfigurationError
from proxy.rendering import harmony_vocabulary as module
from proxy.rendering.harmony_vocabulary import VARIABLE, harmony_vocabulary
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import write_checkpoint
from tests.proxy.rendering.harmony import HarmonyTokenizer

PUBLISHED_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""Of o200k_base.tiktoken, from the source of tiktoken (`tiktoken_ext/openai_public.py`)."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HarmonyTokenizer:
    return HarmonyTokenizer(load_tokenizer(write_checkpoint(tmp_path_factory.mktemp("small"))))


def test_file_from_the_checkpoint_is_the_published_one_and_is_removed(
    tokenizer: HarmonyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with harmony_vocabulary(tokenizer):
        file = Path(os.environ[VARIABLE], "o200k_base.tiktoken")
        assert hashlib.sha256(file.read_bytes()).hexdigest() == PUBLISHED_SHA256
    assert not file.exists()
    assert VARIABLE not in os.environ


def test_renderer_is_created_while_the_vocabulary_is_there(
    tokenizer: HarmonyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def create(*_: Any) -> None:
        seen.append(os.environ[VARIABLE])
        raise ValueError("seen")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("proxy.rendering.selection.create_renderer", create)
    with pytest.raises(ConfigurationError, match="seen"):
        Rendering(tokenizer, RenderingConfig(renderer="gpt-oss"))
    assert seen


def test_folder_that_the_user_names_is_left_alone(
    tokenizer: HarmonyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/their/own")
    with harmony_vocabulary(tokenizer):
        assert os.environ[VARIABLE] == "/their/own"
    assert os.environ[VARIABLE] == "/their/own"


def test_other_vocabularies_never_ask_for_gpt_oss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `auto` every renderer is tried; this one would download its vocabulary."""

    def create(tokenizer: Any, config: Any = None, **_: Any) -> None:
        assert getattr(config, "name", "") != "gpt-oss"
        raise ValueError("another vocabulary")

    monkeypatch.setattr("proxy.rendering.selection.create_renderer", create)
    other = load_tokenizer(write_checkpoint(tmp_path))
    with pytest.raises(ConfigurationError, match="special tokens are not those of gpt-oss"):
        Rendering(other, RenderingConfig(renderer="gpt-oss"))


def test_vocabulary_with_holes_is_refused(
    tokenizer: HarmonyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module, "TOKENS", module.TOKENS + 1)
    with pytest.raises(ValueError, match="no token for 1 of"), harmony_vocabulary(tokenizer):
        pass
