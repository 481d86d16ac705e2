"""Real PNG pictures that agents send, and a session that has them."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from proxy.client import SessionHandle
from tests.proxy.conftest import RunningProxy
from tests.proxy.serving.test_images import TOOL, asked, chat, encoded, said

FUNCTION = {
    "type": "function",
    "function": {"name": TOOL["name"], "parameters": TOOL["input_schema"]},
}


def png(width: int, height: int, colour: int = 0) -> bytes:
    """A picture of squares in two colours."""
    rows = b"".join(
        b"\0"
        + b"".join(
            bytes((x * 255 // width, y * 255 // height, colour))
            if (x // 16 + y // 16) % 2
            else b"\xf0\xf0\xf0"
            for x in range(width)
        )
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


SCREEN, ICON, OTHER = png(640, 400), png(48, 48, 90), png(640, 400, 200)


async def record_pictures(proxy: RunningProxy, name: str = "looks") -> SessionHandle:
    """Three calls: a question with two images, a tool's result with one, and the same history with
    another image in it."""
    session = await proxy.session(trial_id=name, metadata={"task_id": "look"})
    proxy.answers('<tool_call>\n{"name": "Read", "arguments": {"path": "a.png"}}\n</tool_call>')
    history: list[Any] = [asked("Compare", SCREEN, "with this icon:", ICON, "What differs?")]
    answer = said(await chat(proxy, session, *history, tools=[FUNCTION]))
    url = {"url": f"data:image/png;base64,{encoded(OTHER)}"}
    shown = [{"type": "text", "text": "a.png:"}, {"type": "image_url", "image_url": url}]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": shown}
    proxy.answers("The screen is larger than the icon.")
    history += [answer, result]
    history += [said(await chat(proxy, session, *history, tools=[FUNCTION])), asked("Sure?")]
    proxy.answers("Yes.")
    await chat(proxy, session, *history, tools=[FUNCTION])
    history[0] = asked("Compare", OTHER, "with this icon:", ICON, "What differs?")
    proxy.answers("Nothing.")
    await chat(proxy, session, *history[:1], tools=[FUNCTION])
    return session
