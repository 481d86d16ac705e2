"""What the commands of proxy, trainer, swarm and relay share: imports of large packages without the
garbage collections that take a sixth of their time, standard output, and the option `--version`.

Invariants: what a command prints never ends it because the terminal's encoding lacks a character;
the installed version is read only when it is asked for.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """For the imports of a program that begins.

    Example:
    with importing():
        import torch
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def find_own_modules() -> None:
    """Lets a program import parts of a user's own from the working folder, after all others."""
    if "" not in sys.path:
        sys.path.append("")


def escape_unknown_characters() -> None:
    """Prints a character that the encoding of standard output lacks as an escape, like `\\u2026`,
    as Python does on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


class PrintVersion(argparse.Action):
    """Example: parser.add_argument("--version", action=PrintVersion, nargs=0)"""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(f"{parser.prog} {metadata.version('agentic-rl')}\n")
        parser.exit()
