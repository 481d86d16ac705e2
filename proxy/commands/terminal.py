"""Text of agents and models for a terminal.

Invariant: what is printed cannot move the cursor, change colours or the title, or reverse the
direction of text.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""All control characters but the tab and the line break; those that are invisible or change the
direction of text; and lone surrogates, which cannot be printed."""


def visible(text: str) -> str:
    """The text with such characters made visible. Example: visible("\\x1b[31m") == "␛[31m" """
    return _CONTROLS.sub(_shown, text)


def one_line(text: str) -> str:
    """The visible text without line breaks and tabs."""
    return visible(text).replace("\n", "↵").replace("\t", "⇥")


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
