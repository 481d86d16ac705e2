"""Removes folders that an agent has filled, however it has filled them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def remove_folder(folder: Path) -> None:
    """Removes what it can, and ignores errors. An agent can nest folders deeper than Python
    recurses, for example by copying a folder into itself."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder.absolute())], stderr=subprocess.DEVNULL)
