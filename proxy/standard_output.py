"""Standard output of the commands of proxy, trainer, swarm and relay.

Invariant: what a command prints never ends it because the terminal's encoding lacks a character.
"""

from __future__ import annotations

import io
import sys


def escape_unknown_characters() -> None:
    """Prints a character that the encoding of standard output lacks as an escape, like `\\u2026`,
    as Python does on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
