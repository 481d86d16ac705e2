"""The text that a model sees in the place of something that is not text.

A model that reads images gets those that a request holds (`wire.images`). Every other picture, a
document, or what a provider's own tool has done is shown as a short text, which is part of a prompt
and never trained, and noted for an event. Invariant: the same block gives the same text in every
request, so that a history which has one continues the recorded path.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from proxy.conversation.images import joined_blocks
from proxy.wire.fields import Fields

MAX_CHARS = 2000
"""Characters of a block of unknown content that are shown."""
MAX_URL_CHARS = 200
MAX_LEVELS = 8
_MEDIA_CHARS = 512
"""A longer string of base64 in a block is data, and not shown."""
_BASE64 = re.compile(r"[A-Za-z0-9+/_=-]+")
_DATA_URL = re.compile(r"data:(?P<media>[^;,]{0,100})[^,]{0,200},")
_HIDDEN = frozenset(
    (
        *(
            "cache_control",
            "caller",
            "citations",
            "encrypted_content",
            "encrypted_index",
            "fingerprint",
        ),
        *("id", "prompt_cache_breakpoint", "signature", "status", "type"),
    )
)
"""Fields without meaning for the model."""

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
"""Blocks that are text: the field that holds it, by type, in all dialects."""
MEDIA = frozenset(
    (
        *("image", "image_url", "input_image", "computer_screenshot"),
        *("document", "file", "input_file", "input_audio", "audio", "video", "container_upload"),
    )
)
"""Blocks that refer to data or hold it: their kind of data is shown, and its size."""


def block_text(block: Fields) -> str:
    """The text of a block of any dialect, or the text that is shown in its place."""
    kind = block.text("type", "text")
    if kind in TEXTS:
        return block.text(TEXTS[kind], "")
    if kind == "search_result":
        head = [block.get(name) for name in ("title", "source")]
        lines = [text for text in head if isinstance(text, str) and text]
        return "\n".join([*lines, *(block_text(each) for each in block.objects("content"))])
    source = block.get("source")
    if kind == "document" and isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return _titled(block, str(source["data"]))
        if source.get("type") == "content":
            content = source.get("content")
            inner = block.child("source")
            text = content if isinstance(content, str) else joined(inner, "content")
            return _titled(block, text)
    text = shown(kind, block.data)
    if block.images is not None and (taken := block.images.taken(block.data, text)) is not None:
        return taken
    block.note("shown_as_text", kind, text)
    return text


def joined(fields: Fields, name: str) -> str:
    """The texts of the blocks at `name` (`joined_blocks`); a string may stand for one text
    block."""
    content = fields.get(name)
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for at, block in enumerate(fields.items(name)):
        texts.append(
            block if isinstance(block, str) else block_text(Fields(block, fields, name, at))
        )
    return joined_blocks(texts)


def shown(kind: str, data: dict[str, Any]) -> str:
    """Example: `[image: image/png, 2048 bytes; this model reads only text]`"""
    if kind in MEDIA:
        return f"[{kind}: {_media(data)}; this model reads only text]"
    return f"[{kind[:80]}] {_readable(data)}".rstrip()


def _titled(block: Fields, text: str) -> str:
    title = block.get("title")
    return f"{title}\n{text}" if isinstance(title, str) and title else text


def _media(data: dict[str, Any]) -> str:
    """Name, type and size of the data in a block, or where it is."""
    names = (data.get(name) for name in ("title", "filename", "file_id"))
    found = [name[:MAX_URL_CHARS] for name in names if isinstance(name, str)]
    for value in data.values():
        if isinstance(value, dict):
            kind = value.get("media_type") or value.get("format") or value.get("filename")
            found += [kind[:MAX_URL_CHARS]] if isinstance(kind, str) else []
            values = [v for k, v in value.items() if k in ("data", "url", "file_data", "file_id")]
        else:
            values = [value]
        found += [place for each in values if (place := _place(each))]
    return ", ".join(dict.fromkeys(found)) or "no data"


def _place(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    url = _DATA_URL.match(value)
    if url is not None:
        return ", ".join(filter(None, (url["media"], _size(value[url.end() :]))))
    if re.match(r"[a-z]{2,10}://", value):
        return value[:MAX_URL_CHARS]
    if len(value) >= 32 and _BASE64.fullmatch(value):
        return _size(value)
    return ""


def _size(data: str) -> str:
    return f"{len(data.rstrip('=')) * 3 // 4} bytes"


def _readable(data: dict[str, Any]) -> str:
    """What a block says, as text or JSON."""
    value = _cleaned(data, MAX_LEVELS)
    while isinstance(value, dict | list) and len(value) == 1:
        value = value[0] if isinstance(value, list) else next(iter(value.values()))
    if value in (None, {}, []):
        return ""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "…"


def _cleaned(value: Any, levels: int) -> Any:
    if isinstance(value, str):
        if _DATA_URL.match(value) or (len(value) > _MEDIA_CHARS and _BASE64.fullmatch(value)):
            return f"<{_place(value)}>"
        return value
    if not levels:
        return "…" if isinstance(value, dict | list) else value
    if isinstance(value, dict):
        return {
            key: cleaned
            for key, inner in value.items()
            if key not in _HIDDEN and (cleaned := _cleaned(inner, levels - 1)) not in (None, "", {})
        }
    if isinstance(value, list):
        return [_cleaned(each, levels - 1) for each in value]
    return value
