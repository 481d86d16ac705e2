"""The swarm's token: from the environment, or from a file that the server creates.

Invariant: there is always a token. Without a variable, the server generates one and writes it to a
file in its state folder that only its user can read; clients on the same machine read it there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from proxy.kept_key import kept_key

TOKEN_VARIABLE = "AGENTIC_SWARM_TOKEN"
DEFAULT_STATE_DIR = Path("runs/swarm")
FILE = "token"

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def server_token(state_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The token for a server: from the variable, else from the folder's file, which is created if
    it does not exist."""
    if given := environment.get(TOKEN_VARIABLE):
        return given
    return kept_key(state_dir / FILE)


def client_token(
    url: str,
    state_dir: Path = DEFAULT_STATE_DIR,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """The token for the server at `url`: from the variable, else, for a server on this machine,
    from its state folder; empty if there is none."""
    if given := environment.get(TOKEN_VARIABLE):
        return given
    path = state_dir / FILE
    if urlsplit(url).hostname in _LOOPBACK and path.is_file():
        return path.read_text().strip()
    return ""
