"""The admin key: the configured one, or else those in a file, which the proxy creates.

Invariant: a proxy that serves has an admin key. Each line of the file is one, so that a key can be
replaced without a restart (`proxy/keys.py`). Precedence for servers and clients: explicit
argument or setting > AGENTIC_PROXY_ADMIN_KEY > the file (AGENTIC_PROXY_ADMIN_KEY_FILE or default).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from proxy.config import ListenConfig, ProxyConfig
from proxy.errors import ConfigurationError, SessionError
from proxy.keys import KeyFile, is_one_of, kept_key, lines
from proxy.settings.state_folder import default_store, state_folder

VARIABLE = "AGENTIC_PROXY_ADMIN_KEY"
FILE_VARIABLE = f"{VARIABLE}_FILE"
SUFFIX = ".admin-key"
"""Appended to the name of a SQLite file."""
STATE_FILE = "admin-key"
"""Path in the user's state folder, for stores that are not a file."""


class AdminKeys:
    """The valid admin keys: those in `admin_key_file` if it is set, else `admin_key`."""

    def __init__(self, config: ListenConfig) -> None:
        self._key = "" if config.admin_key is None else config.admin_key.get_secret_value()
        file = config.admin_key_file
        self._file = None if file is None else KeyFile(file.expanduser(), [self._key])

    def accepts(self, given: str) -> bool:
        """Whether `given` is a valid admin key."""
        return is_one_of(given, self.current())

    def current(self) -> list[bytes]:
        """The admin keys that are valid now."""
        if self._file is not None:
            return self._file.current()
        return [self._key.encode()] if self._key else []

    def check(self, given: str) -> None:
        """
        Raises:
            SessionError: 401; `given` is not an admin key.
        """
        if not self.accepts(given):
            raise SessionError(
                "the control plane needs the admin key: `serve` prints in which file it is; set "
                f"{FILE_VARIABLE} to that file or {VARIABLE} to the key, and a program of your own "
                "sends `Authorization: Bearer KEY`",
                status=401,
            )


def with_admin_key(config: ProxyConfig) -> ProxyConfig:
    """The configuration with an admin key: its own, or else the first one in `key_file`, which is
    created if it does not exist. `admin_key_file` is then the file that is in use, or None.

    Raises:
        ConfigurationError: the file cannot be created or read, or is empty.
    """
    if config.admin_key is not None:
        return config.model_copy(update={"admin_key_file": None})
    path = key_file(config)
    try:
        key = kept_key(path)
    except OSError as error:
        raise ConfigurationError(
            f"admin_key_file: {path} cannot be used: {error.strerror}; set {VARIABLE}, or choose "
            "another file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"admin_key_file: {path} is not a text in UTF-8; remove it, or write a key"
        ) from error
    if not key:
        raise ConfigurationError(f"admin_key_file: {path} is empty; remove it, or write a key")
    return config.model_copy(update={"admin_key": SecretStr(key), "admin_key_file": path})


def key_file(config: ProxyConfig) -> Path:
    """The path of the key file: `admin_key_file`; by default a file next to a SQLite store, and for
    other stores a file in the user's state folder (`$XDG_STATE_HOME` or `~/.local/state`)."""
    if config.admin_key_file is not None:
        return config.admin_key_file.expanduser()
    scheme, separator, rest = config.store.partition("://")
    if not separator or scheme == "sqlite":
        return Path((rest.removeprefix("/") if separator else config.store) + SUFFIX).absolute()
    return _state_file()


def kept_files() -> list[Path]:
    """The places on this machine where a proxy keeps its keys, its store and the address of its
    vLLM by default, whether they exist or not, and the file that `FILE_VARIABLE` names: what agents
    must not see."""
    named = os.environ.get(FILE_VARIABLE)
    given = [Path(named).expanduser()] if named else []
    store = default_store()
    names = (store.name + suffix for suffix in ("", "-wal", "-shm", SUFFIX))
    return [*map(store.with_name, (*names, "vllm.url")), _state_file(), *given]


def client_key(url: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The admin key for the proxy at `url`: the environment's, as `VARIABLE` or in the file that
    `FILE_VARIABLE` names, or else, for a proxy on this machine, the one in the file next to the
    default store. None if there is none of them.

    Raises:
        ConfigurationError: the file that the environment names cannot be read, or has no key.
    """
    if given := environment.get(VARIABLE):
        return given
    if named := environment.get(FILE_VARIABLE):
        return _first_key(Path(named))
    path = default_store().with_name(default_store().name + SUFFIX)
    return next(iter(lines(path)), None) if _is_here(url) and path.is_file() else None


def configured_key(config: ProxyConfig, url: str) -> str | None:
    """The admin key for the proxy at `url`, which has this configuration: the configured one, the
    first one in `key_file`, or else that of `client_key`.

    Raises:
        ConfigurationError: as `client_key`.
    """
    if config.admin_key is not None:
        return config.admin_key.get_secret_value()
    path = key_file(config)
    return next(iter(lines(path)), None) if path.is_file() else client_key(url)


def _first_key(path: Path) -> str:
    try:
        return lines(path.expanduser())[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise ConfigurationError(
            f"{FILE_VARIABLE}: {path} has no admin key ({error}); write the key into it, or set "
            f"{VARIABLE}"
        ) from error


def _state_file() -> Path:
    return state_folder() / STATE_FILE


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
