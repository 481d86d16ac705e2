"""Where kernels that are compiled are kept, if the home folder cannot be written.

vLLM, Triton and FlashInfer write to the home folder, and on a GPU they end if they cannot.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

PLACES = {
    "VLLM_CACHE_ROOT": ("vllm", "XDG_CACHE_HOME"),
    "TRITON_CACHE_DIR": ("triton", "TRITON_HOME"),
    "FLASHINFER_WORKSPACE_BASE": ("", ""),
}
"""Variable → its part of our folder, and another variable that also says where."""


def compile_elsewhere() -> None:
    """Sets the variables for this process and its children if the home folder cannot be written.
    What the user has set stays."""
    if os.access(os.path.expanduser("~"), os.W_OK | os.X_OK):
        return
    missing = [n for n, (_, other) in PLACES.items() if not {n, other} & os.environ.keys()]
    if missing:
        folder = _own_folder()
        os.environ.update({name: str(folder / PLACES[name][0]) for name in missing})


def _own_folder() -> Path:
    """Nobody else can write to it, because what is in it is executed."""
    folder = Path(tempfile.gettempdir(), f"agentic-compiled-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        others = stat.S_IRWXG | stat.S_IRWXO
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & others:
            return Path(tempfile.mkdtemp(prefix="agentic-compiled-"))
    return folder
