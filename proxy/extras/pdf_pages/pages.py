"""Renders the pages of a PDF in a process of its own, because a document is an agent's.

Invariant: the same document gives the same bytes, on the same version of pypdfium2, so that a
history which has it continues the recorded path.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from importlib.util import find_spec
from struct import Struct

MAX_PAGES = 20
"""Of one document; the agent is told how many there are."""
LONGEST_EDGE = 1280
"""Pixels."""
TIMEOUT_S = 90.0
LENGTH = Struct(">I")


def is_installed() -> bool:
    return find_spec("pypdfium2") is not None


async def pages(document: bytes) -> tuple[list[bytes], int] | None:
    """The first MAX_PAGES pages as PNG, and the number of all; None: it cannot be read."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-m", "proxy.extras.pdf_pages"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            out, _ = await process.communicate(document)
    except TimeoutError:
        out = b""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return _read(out) if process.returncode == 0 else None


def _read(out: bytes) -> tuple[list[bytes], int] | None:
    if len(out) < LENGTH.size:
        return None
    (count,), at, found = LENGTH.unpack_from(out), LENGTH.size, list[bytes]()
    while at < len(out):
        (size,) = LENGTH.unpack_from(out, at)
        at += LENGTH.size
        found.append(out[at : at + size])
        at += size
    return found, count
