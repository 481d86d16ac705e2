"""The option `--version` of a command. The installed version is read only when it is asked for."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from typing import Any


class PrintVersion(argparse.Action):
    """Example: parser.add_argument("--version", action=PrintVersion, nargs=0)"""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(f"{parser.prog} {metadata.version('agentic-rl')}\n")
        parser.exit()
