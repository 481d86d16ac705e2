"""Gemma 3's images in a prompt: words and line breaks around them, which merge with the text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from proxy.config import RenderingConfig
from proxy.conversation.images import mark
from proxy.conversation.messages import Conversation, Message
from proxy.records import ImageSpan
from proxy.records.images import engine_ids, found_images
from proxy.rendering.rendering import Rendering
from proxy.rendering.tokenizer import load_tokenizer
from tests.proxy.checkpoint import GEMMA_WORDS, write_checkpoint, write_gemma_checkpoint

PUBLISHED = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<start_of_image>"
    "{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Gemma 3's own template: it takes no tools and trims texts."""
FIRST, SECOND = (ImageSpan(0, 4, 0, digit * 64, digit * 64) for digit in "ab")


@pytest.fixture(scope="module")
def rendering(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    folder = write_gemma_checkpoint(tmp_path_factory.mktemp("gemma3"), PUBLISHED)
    return Rendering(load_tokenizer(folder), RenderingConfig())


def shown(rendering: Rendering, *messages: Message, images: bool = True) -> str:
    """The text of the prompt that the engine gets."""
    known = {each.sha256: each for each in (FIRST, SECOND)} if images else {}
    ids = rendering.full(Conversation(list(messages), images=known))
    token = rendering.image_token
    assert token is not None
    spans = found_images(ids, (FIRST, SECOND))
    own = engine_ids(ids, [ImageSpan(s.offset, s.tokens, token, s.digest, s.sha256) for s in spans])
    tokenizer = rendering.tokenizer
    text = tokenizer.decode(own.tolist())
    # what the tokenizer makes of the text that the model's own processor writes
    assert np.array_equal(tokenizer.fast.encode(text, add_special_tokens=False).ids, own)
    return text


def framed(span: ImageSpan) -> str:
    return f"\n\n<start_of_image>{'<image_soft_token>' * span.tokens}<end_of_image>\n\n"


def test_images_are_framed_and_line_breaks_merge(rendering: Rendering) -> None:
    """Also two images without a text between them."""
    asked = Message("user", f"{mark(FIRST.sha256)}{mark(SECOND.sha256)}What is this?")
    assert shown(rendering, asked) == (
        f"<|im_start|>user\n{framed(FIRST)}{framed(SECOND)}What is this?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_words_for_images_in_texts_are_text(rendering: Rendering) -> None:
    """Of users and of the model, with images in the conversation and without."""
    word, _, soft = GEMMA_WORDS
    said = [
        Message("user", f"{word} and {soft}"),
        Message("assistant", f"{word} and {soft}"),
        Message("user", "Go on."),
    ]
    token, start = (rendering.tokenizer.fast.token_to_id(each) for each in (soft, word))
    for images, last in ((False, "Go on."), (True, mark(FIRST.sha256))):
        known = {FIRST.sha256: FIRST} if images else {}
        ids = rendering.full(Conversation([*said[:2], Message("user", last)], images=known))
        assert (ids == token).sum() == 0
        assert (ids == start).sum() == images
        assert (ids < 0).sum() == FIRST.tokens * images


def test_checkpoint_without_its_words_shows_images_as_text(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "gemma3", template="plain.jinja")
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    rendering = Rendering(load_tokenizer(folder), RenderingConfig())
    assert rendering.image_token is None
    assert rendering.tokenizer.image_frame is None
