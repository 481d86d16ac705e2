"""The images of a request, of any dialect.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}              Chat
    {"type": "image", "source": {"type": "base64", "media_type": …, "data": …}}         Messages
    {"type": "input_image", "image_url": "data:image/png;base64,…"}                     Responses

Invariant: the bytes are those that came. They are neither decoded nor changed here, so that what is
stored under their sha256 is what the agent sent. A block whose image cannot be taken is shown as a
text, like any block that a model does not read, because it may stand in a history.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any

import msgspec

from proxy.conversation.images import MARK, joined_blocks, mark, rewritten
from proxy.conversation.messages import Message
from proxy.wire.image_header import pixels

MAX_BYTES = 20 * 2**20
"""Of one image."""
MAX_PIXELS = 7680 * 4320
"""Of one image: a screen of 8K. It takes an engine seconds and 100 MB to decode it."""
MAX_TEXT_CHARS = MAX_BYTES * 3 // 2
"""Of its base64, which may have line breaks."""
KNOWN_BYTES = 64 * 2**20
MAX_LINKS = 50
"""URLs and documents of one request; further ones are shown as text."""
MAX_IMAGES = 1000
"""Of one request, each counted once."""
KINDS = frozenset(("image_url", "image", "input_image", "computer_screenshot"))
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_PDF = "JVBERi"
"""`%PDF` in base64."""
READ_BY = ("user", "tool")
"""Chat templates have images in the messages of these roles."""


class SentImage(msgspec.Struct, frozen=True):
    """Example: SentImage("9f86d0…", "image/png", "iVBORw0K…", "[image: image/png, 2 kB; …]")"""

    sha256: str
    """Of the bytes, in hexadecimal."""
    media_type: str
    """What the bytes are, whatever the request says: agents declare PNG for what is JPEG."""
    text: str
    """The bytes in base64."""
    shown: str
    """The text that a model sees which does not read it."""

    @property
    def data(self) -> bytes:
        return _decoded(self.text)


class SentLink(msgspec.Struct, frozen=True):
    """What has to be fetched or rendered before it is images."""

    shown: str
    url: str | None = None
    document: str | None = None
    """A PDF in base64."""


Made = tuple[list[SentImage], str]
"""The images that a link is, and the text after them."""


def fetched_image(data: bytes, shown: str) -> SentImage | None:
    """The image that an URL gave; None: it is none, or too large."""
    media_type = _readable(data)
    if media_type is None:
        return None
    text = binascii.b2a_base64(data, newline=False).decode()
    return SentImage(hashlib.sha256(data).hexdigest(), media_type, text, shown)


class KnownTexts:
    """What the last images in base64 are, in at most `limit_bytes` of memory: an agent repeats its
    images with each call, and decoding one takes longer than all else that is done with it."""

    def __init__(self, limit_bytes: int = KNOWN_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._known: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._lock = threading.Lock()  # large bodies are parsed in threads

    def get(self, text: str) -> tuple[str, str] | None:
        """sha256 and media type; None: it is no image."""
        with self._lock:
            if (known := self._known.get(text)) is not None:
                self._known.move_to_end(text)
                return known
        found = _read(text)
        if found is not None:
            with self._lock:
                self._bytes += 0 if text in self._known else len(text)
                self._known[text] = found
                while self._bytes > self._limit_bytes:
                    self._bytes -= len(self._known.popitem(last=False)[0])
        return found


_KNOWN_TEXTS = KnownTexts()


class SentImages:
    """Takes the images of one request out of its blocks.

    Until `settle`, they have marks that no text can have, because they name this object.
    """

    def __init__(self, urls: Sequence[str] = (), *, documents: bool = False) -> None:
        """`urls`: beginnings of those from which images are fetched. `documents`: whether pages of
        PDFs are images."""
        self.found: dict[str, SentImage] = {}
        """By sha256."""
        self.linked: dict[str, SentLink] = {}
        """By the sha256 of the URL or the document, which stands in the texts until the images are
        there."""
        self._urls = tuple(urls)
        self._documents = documents
        self._name = token_hex(8)

    def taken(self, block: dict[str, Any], shown: str) -> str | None:
        """The mark of the image that a block holds; None if it has no bytes (a URL, a file's id),
        too many, too large, or bytes of another format than PNG, JPEG, GIF and WebP.

        Args:
            shown: the text that stands for the block where no model reads it.
        """
        url = _url(block) if self._urls else None
        if url is not None and url.startswith(self._urls):
            return self._link(url, SentLink(shown, url=url))
        document = _document(block) if self._documents else None
        if document is not None:
            return self._link(document, SentLink(shown, document=document))
        text = _base64(block)
        if text is None or len(text) > MAX_TEXT_CHARS:
            return None
        known = _KNOWN_TEXTS.get(text)
        if known is None:
            return None
        sha256, media_type = known
        if sha256 not in self.found:
            if len(self.found) == MAX_IMAGES:
                return None
            self.found[sha256] = SentImage(sha256, media_type, text, shown)
        return self._marked(sha256)

    def _link(self, content: str, link: SentLink) -> str | None:
        name = hashlib.sha256(content.encode()).hexdigest()
        if name not in self.linked and len(self.linked) == MAX_LINKS:
            return None
        self.linked[name] = link
        return self._marked(name)

    def _marked(self, name: str) -> str:
        return f"{MARK}{self._name}{name}{MARK}"

    def split(self, text: str) -> list[str]:
        """The text before the first image, its name, the text up to the next one, …"""
        return re.split(f"{MARK}{self._name}([0-9a-f]{{64}}){MARK}", text)

    def shown(self, name: str) -> str:
        """The text that stands for an image or a link where no model reads it."""
        return (self.linked.get(name) or self.found[name]).shown

    def fetched(self, messages: list[Message], made: Mapping[str, Made | None]) -> None:
        """Puts the images in the place of what they were made of; None: a text."""
        for name in self.linked.keys() & made.keys():
            for image in (made[name] or ([], ""))[0]:
                self.found.setdefault(image.sha256, image)

        def there(name: str) -> str:
            if name not in self.linked:
                return mark(name)
            if (found := made[name]) is None:
                return self.linked[name].shown
            images, rest = found
            return "".join(mark(image.sha256) for image in images) + rest

        for message in messages:
            if message.role in READ_BY:
                message.text = rewritten(message.text, there)

    def shown_in(self, messages: list[Message], unread: set[str]) -> None:
        """Shows the images as texts whose sha256 is in `unread`."""

        def there(sha256: str) -> str:
            return self.found[sha256].shown if sha256 in unread else mark(sha256)

        for message in messages:
            if message.role in READ_BY:
                message.text = rewritten(message.text, there)


def settle(messages: Iterable[Any], sent: SentImages | None) -> bool:
    """Gives the images of a request their marks, once it is parsed; shows those of roles whose
    images no chat template has as texts. Of other texts, those that could be taken for marks lose
    them; an assistant's stay as they are, because they may have been sampled, and stand for
    nothing there. Returns whether there is an image.

    Args:
        messages: those of the request; what is not one is left out.
    """
    found = False
    for message in messages:
        if not isinstance(message, Message) or MARK not in message.text:
            continue
        pieces = [message.text] if sent is None else sent.split(message.text)
        texts, names = pieces[::2], pieces[1::2]
        if message.role != "assistant":
            texts = [text.replace(MARK, "\N{REPLACEMENT CHARACTER}") for text in texts]
        is_read = message.role in READ_BY
        found = found or (is_read and bool(names))
        pieces[::2] = texts
        if sent is not None:
            pieces[1::2] = [mark(name) if is_read else sent.shown(name) for name in names]
        message.text = "".join(pieces) if is_read else joined_blocks(filter(None, pieces))
    return found


def _url(block: dict[str, Any]) -> str | None:
    """The URL that a block names its image by."""
    source = block.get("source")
    url = block.get("image_url")
    if isinstance(source, dict):
        url = source.get("url") if source.get("type") == "url" else None
    elif isinstance(url, dict):
        url = url.get("url")
    return url if block.get("type") in KINDS and isinstance(url, str) else None


def _document(block: dict[str, Any]) -> str | None:
    """The PDF that a block holds, in base64."""
    source, file = block.get("source"), block.get("file")
    value = block.get("file_data") if block.get("type") == "input_file" else None
    if block.get("type") == "document" and isinstance(source, dict):
        value = source.get("data") if source.get("type") == "base64" else None
    elif block.get("type") == "file" and isinstance(file, dict):
        value = file.get("file_data")
    if not isinstance(value, str):
        return None
    text = value.partition(",")[2] if value.startswith("data:") else value
    return text if text.startswith(_PDF) and len(text) * 3 // 4 <= MAX_BYTES else None


def _base64(block: dict[str, Any]) -> str | None:
    if block.get("type") not in KINDS:
        return None
    source = block.get("source")
    if isinstance(source, dict):
        is_bare = source.get("type") == "base64"
        return _text(source.get("data") if is_bare else source.get("url"), bare=is_bare)
    url = block.get("image_url")
    return _text(url.get("url") if isinstance(url, dict) else url, bare=False)


def _text(value: Any, *, bare: bool) -> str | None:
    """`bare`: base64 may stand without the head of a data URL."""
    if not isinstance(value, str):
        return None
    head = _DATA_URL.match(value)
    if head is None and not bare:
        return None
    return value[head.end() :] if head else value


def _read(text: str) -> tuple[str, str] | None:
    try:
        data = _decoded(text)
    except ValueError:
        return None
    media_type = _readable(data)
    if media_type is None:
        return None
    return hashlib.sha256(data).hexdigest(), media_type


def _decoded(text: str) -> bytes:
    """Of base64 with white space, or with the alphabet of URLs, which Google's clients send, with
    its padding or without. Raises ValueError."""
    digits = text.encode("ascii").translate(_STANDARD, b" \t\r\n\f\v").rstrip(b"=")
    return binascii.a2b_base64(digits + b"=" * (-len(digits) % 4), strict_mode=True)


_STANDARD = bytes.maketrans(b"-_", b"+/")


def _readable(data: bytes) -> str | None:
    """The media type of an image that an engine is given."""
    media_type = _media_type(data)
    if media_type is None or len(data) > MAX_BYTES:
        return None
    try:
        return media_type if pixels(data, media_type) <= MAX_PIXELS else None
    except ValueError:
        return None


def _media_type(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), None)
