"""The user's folder for what programs keep: `$XDG_STATE_HOME`, or `~/.local/state`."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """`agentic-proxy` in it, which may not exist yet; for a user without a home, the working
    folder."""
    given = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(given or Path.home() / ".local" / "state", "agentic-proxy")
    except RuntimeError:
        return Path.cwd()


def default_store() -> Path:
    """The SQLite file in it, one for all folders: the record does not lie in a repository."""
    return state_folder() / "sessions.db"


def make_state_folder() -> Path:
    """The folder, which only this user can read if it did not exist."""
    folder = state_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
