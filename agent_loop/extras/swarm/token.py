"""The swarm's token: from the environment, from a file that it names, or from one that the server
creates.

Invariant: there is always a token. Without either variable, the server generates one and writes it
to a file in its state folder that only its user can read; clients on the same machine read it
there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from agent_loop.extras.swarm.errors import SwarmError
from proxy.errors import ConfigurationError
from proxy.keys import kept_key
from proxy.machine.secrecy import read_secret

TOKEN_VARIABLE = "AGENTIC_SWARM_TOKEN"
TOKEN_FILE_VARIABLE = "AGENTIC_SWARM_TOKEN_FILE"
"""Variable with the path of a file that contains the token, in place of `TOKEN_VARIABLE`."""
DEFAULT_STATE_DIR = Path("runs/swarm")
FILE = "token"

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def server_token(state_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The token for a server: from the variables, else from the folder's file, which is created if
    it does not exist.

    Raises:
        ConfigurationError: the file of `TOKEN_FILE_VARIABLE` cannot be read, or is empty.
    """
    try:
        given = _given(environment)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    return given or kept_key(state_dir / FILE)


def token_place(state_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Where the token of `server_token` is: the variable's name, or the path of the file."""
    if environment.get(TOKEN_VARIABLE):
        return TOKEN_VARIABLE
    return environment.get(TOKEN_FILE_VARIABLE) or str(state_dir / FILE)


def client_token(
    url: str,
    state_dir: Path = DEFAULT_STATE_DIR,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """The token for the server at `url`: from the variables, else, for a server on this machine,
    from its state folder; empty if there is none.

    Raises:
        SwarmError: the file of `TOKEN_FILE_VARIABLE` cannot be read, or is empty.
    """
    try:
        given = _given(environment)
    except ValueError as error:
        raise SwarmError(str(error), "invalid") from error
    if given:
        return given
    path = state_dir / FILE
    if urlsplit(url).hostname in _LOOPBACK and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    return ""


def _given(environment: Mapping[str, str]) -> str | None:
    if token := environment.get(TOKEN_VARIABLE):
        return token
    path = environment.get(TOKEN_FILE_VARIABLE)
    return read_secret(Path(path), TOKEN_FILE_VARIABLE) if path else None
