"""Secrets that a configuration gives as a file: `token_file` in place of `token`.

Invariant: the content of the file, without white space around it, takes the place of the key before
the configuration is checked, so the code that uses a secret does not know where it came from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def with_secret(data: Any, key: str) -> Any:
    """`data`, a section before it is checked, with the secret from the file that `KEY_file` names.

    Raises:
        ValueError: the file cannot be read or is empty, or the key is set, too.
    """
    name = f"{key}_file"
    if not isinstance(data, dict) or data.get(name) is None:
        return data
    if data.get(key) is not None:
        raise ValueError(f"{key} and {name} are both set; remove one of them")
    secret = read_secret(Path(data[name]), name)
    return {other: value for other, value in data.items() if other != name} | {key: secret}


def read_secret(path: Path, name: str) -> str:
    """The content of the file that the key `name` of a configuration names.

    Raises:
        ValueError: the file cannot be read, is not UTF-8, or is empty.
    """
    try:
        secret = path.expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: {path} is not a text in UTF-8") from error
    if not secret:
        raise ValueError(f"{name}: {path} is empty; write the secret into it")
    return secret
