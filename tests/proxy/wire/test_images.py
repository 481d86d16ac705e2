"""Images in blocks of the three dialects: their bytes as they came, or a text in their place."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation.images import MARK, joined_blocks, mark, named, parts
from proxy.conversation.messages import Message, Role
from proxy.testing.scripted_images import PICTURE
from proxy.wire import images
from proxy.wire.images import SentImages, settle

PNG = PICTURE + b"pixels" * 20
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
NAME = hashlib.sha256(PNG).hexdigest()
SHOWN = "[image: image/png, 128 bytes; this model reads only text]"
BLOCKS: dict[str, dict[str, Any]] = {
    "chat": {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": TEXT},
    },
    "responses": {"type": "input_image", "image_url": URL},
    "computer": {"type": "computer_screenshot", "image_url": URL},
    "lines": {"type": "image_url", "image_url": f"data:;base64,{TEXT[:40]}\n{TEXT[40:]}"},
    "another declared type": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/jpeg", "data": TEXT},
    },
}


def settled(sent: SentImages, text: str | None, role: Role = "user") -> str:
    message = Message(role, text or "")
    settle([message], sent)
    return message.text


@pytest.mark.parametrize("name", BLOCKS)
def test_every_dialect_gives_the_bytes_that_came(name: str) -> None:
    sent = SentImages()
    assert settled(sent, sent.taken(BLOCKS[name], SHOWN)) == mark(NAME)
    (image,) = sent.found.values()
    assert (image.sha256, image.media_type, image.data) == (NAME, "image/png", PNG)


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\xff\xd8\xff\xc0\0\x0b\x08\0 \0 ", "image/jpeg"),
        (b"GIF89a \0 \0\0\0\0,\0\0\0\0 \0 \0", "image/gif"),
        (b"GIF87a \0 \0\0\0\0,\0\0\0\0 \0 \0", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(7) + b"\x9d\x01\x2a \0 \0", "image/webp"),
    ],
)
def test_type_is_that_of_the_bytes(start: bytes, kind: str) -> None:
    text, sent = base64.b64encode(start + b"more").decode(), SentImages()
    url = f"data:image/png;base64,{text}"
    assert sent.taken({"type": "input_image", "image_url": url}, SHOWN) is not None
    assert [image.media_type for image in sent.found.values()] == [kind]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": URL},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
        {"type": "input_image", "file_id": "file_1"},
        {"type": "image_url", "image_url": {"url": TEXT}},
        {"type": "image_url", "image_url": 5},
        {"type": "image"},
        {"type": "input_image", "image_url": "data:image/svg+xml;base64,PHN2Zz4="},
        {"type": "input_image", "image_url": "data:image/png;base64,AAA*"},
        {"type": "input_image", "image_url": "data:image/png;base64,é"},
    ],
)
def test_what_holds_no_image_stays_text(block: dict[str, Any]) -> None:
    sent = SentImages()
    assert sent.taken(block, SHOWN) is None
    assert sent.found == {}


def test_image_beyond_a_bound_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stand in a history, so that a refusal would end the trial."""
    other = base64.b64encode(PNG + b"large").decode()
    monkeypatch.setattr(images, "MAX_BYTES", len(PNG) - 9)
    assert (
        SentImages().taken({"type": "input_image", "image_url": f"data:;base64,{other}"}, "")
        is None
    )
    monkeypatch.undo()
    monkeypatch.setattr(images, "MAX_PIXELS", 32 * 32 - 1)
    larger = {"type": "input_image", "image_url": f"data:;base64,{other}"}
    assert SentImages().taken(larger, "") is None
    monkeypatch.undo()
    monkeypatch.setattr(images, "MAX_IMAGES", 1)
    sent = SentImages()
    other = base64.b64encode(PNG + b"x").decode()
    assert sent.taken(BLOCKS["chat"], SHOWN) is not None
    assert sent.taken({"type": "input_image", "image_url": f"data:;base64,{other}"}, "") is None
    assert settled(sent, sent.taken(BLOCKS["messages"], SHOWN)) == mark(NAME)


def test_images_that_cannot_be_taken_are_shown_in_their_place() -> None:
    sent = SentImages()
    sent_text = f"See {sent.taken(BLOCKS['chat'], SHOWN)}."
    roles: tuple[Role, ...] = ("system", "user", "tool")
    messages = [Message(role, sent_text) for role in roles]
    assert settle(messages, sent)
    text = f"See {mark(NAME)}."
    shown = f"See \n{SHOWN}\n."  # as with a model that reads only text
    assert [each.text for each in messages] == [shown, text, text]
    sent.shown_in(messages, {NAME})
    assert [each.text for each in messages] == [shown] * 3


texts = st.lists(st.text(st.characters(exclude_characters=MARK), max_size=9), max_size=5)


@given(texts, st.data())
def test_marked_texts_are_read_as_they_were_joined(found: list[str], data: st.DataObject) -> None:
    names = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(3)]
    blocks = [data.draw(st.sampled_from([text, *map(mark, names)])) for text in found]
    whole = joined_blocks(blocks)
    assert named([Message("user", whole)]) == [block[1:-1] for block in blocks if MARK in block]
    rebuilt = "".join(before + (mark(name) if name else "") for before, name in parts(whole))
    assert rebuilt == whole


def test_texts_are_lines_and_an_image_stands_between_them() -> None:
    assert joined_blocks(["a", "b", mark(NAME), "c", "d"]) == f"a\nb{mark(NAME)}c\nd"


def test_further_links_of_a_request_stay_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is fetched."""
    monkeypatch.setattr(images, "MAX_LINKS", 1)
    sent = SentImages(["https://example.org/"])
    blocks = [
        {"type": "image_url", "image_url": {"url": f"https://example.org/{n}.png"}}
        for n in (1, 2, 1)
    ]
    assert [sent.taken(block, SHOWN) is None for block in blocks] == [False, True, False]
    assert [link.url for link in sent.linked.values()] == ["https://example.org/1.png"]
