"""Seals what a function has returned: its file can be written by the programs that it has started,
such as the shell of the model, until the trial has ended."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

SEAL_CHARS = 65
"""Of a seal before a text, with the end of its line."""


def new_seal() -> str:
    """A secret of one call, which only the function's own process gets."""
    return secrets.token_hex(32)


def sealed(text: str, seal: str | None) -> str:
    """The text below its seal; as it is if there is none."""
    return text if seal is None else f"{_of(text, seal)}\n{text}"


def open_sealed(file: Path, seal: str) -> bool:
    """Leaves the text alone in the file, or nothing if it has not this seal, and says which."""
    said, _, text = file.read_bytes().decode(errors="replace").partition("\n")
    holds = hmac.compare_digest(said.encode(), _of(text, seal).encode())
    file.write_text(text if holds else "", encoding="utf-8")
    return holds


def _of(text: str, seal: str) -> str:
    return hmac.new(bytes.fromhex(seal), text.encode(), "sha256").hexdigest()
