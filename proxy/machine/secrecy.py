"""Secrets: how they come from files, go to child processes, and stay out of what people see.

Invariants:
- No environment and no command line contains a secret of ours. A parent passes it to its child
  through a pipe, which is empty once the child has read it.
- Where a configuration gives a secret as a file (`token_file` in place of `token`), the content of
  the file, without white space around it, takes the place of the key before the configuration is
  checked, so that the code that uses a secret does not know where it came from.
- No configuration that is shown contains the value of a key whose name is that of a secret, the
  user and the password of a URL, or the value of `NAME=VALUE`, `name: VALUE` or `--name VALUE`
  where the name is that of a secret; at any depth, in lists, too. Numbers of tokens and the paths
  of files of secrets are shown.

A store's password is given as a file: postgresql://agentic@db:5432/agentic with the file's content
`p@ss/word` becomes postgresql://agentic:p%40ss%2Fword@db:5432/agentic.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from proxy.machine.direct_hosts import with_direct_hosts

PR_SET_DUMPABLE = 4
VARIABLES = frozenset(
    {
        "AGENTIC_PROXY_ADMIN_KEY",
        "AGENTIC_PROXY_RELAY__TOKEN",
        "AGENTIC_SWARM_TOKEN",
        "AGENTIC_WORKER_TOKEN",
        "AGENTIC_WORKER_ENGINE_API_KEY",
        "HARBOR_SERVER_TOKEN",
    }
)
"""Variables in which a user may give a secret. Processes that we start do not inherit them."""


@contextlib.contextmanager
def pipe_with(text: str) -> Iterator[int]:
    """The read end of a pipe from which a child reads `text` once. Pass it in `pass_fds`; where the
    child expects a path, give `/dev/fd/NUMBER`."""
    pipe = LatePipe()
    pipe.write(text)
    with pipe.to_child() as read_fd:
        yield read_fd


class LatePipe:
    """A pipe to a child that starts before it is known what the child is to read.

    Example:
    with pipe.to_child() as fd:
        ...  # starts the child, which waits when it reads
    pipe.write("settings")
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self.written = False

    @contextlib.contextmanager
    def to_child(self) -> Iterator[int]:
        """The read end, as in `pipe_with`; it is closed here at the end of the context."""
        try:
            yield self._read_fd
        finally:
            os.close(self._read_fd)

    def write(self, text: str) -> None:
        """Gives the child all that it reads. To be called once."""
        self.written = True
        threading.Thread(target=_write, args=(self._write_fd, text.encode()), daemon=True).start()

    def close(self) -> None:
        """Lets the child read nothing, unless `write` was called."""
        if not self.written:
            self.written = True
            os.close(self._write_fd)


def from_pipe(fd: int) -> str:
    """The text that the parent wrote, which can be read only once.

    Raises:
        OSError: the parent passed no such pipe, or it was already read.
    """
    with Path(f"/dev/fd/{fd}").open(encoding="utf-8") as pipe:
        text = pipe.read()
    os.close(fd)
    return text


def inherited() -> dict[str, str]:
    """The environment of a child process of ours: our own without `VARIABLES`. No HTTP proxy is
    used for this machine."""
    ours = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return with_direct_hosts(ours)


def hide_memory() -> None:
    """Keeps other processes of this user (not root's) from this process's memory, descriptors and
    environment in `/proc`; there are no core dumps either. Children that exec are not affected.
    Does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(data)


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


MAX_CHARS = 500
"""Characters of a value that are shown."""
HIDDEN = "hidden"
"""What is shown in place of a secret."""
_ENDINGS = ("key", "secret", "token", "password", "passwd", "pwd", "passphrase", "credential")
"""Ends of the words that name a secret, in the singular."""
_SECTIONS = ("env", "auth", "headers", "dsn")
"""Words that name a section or a text that contains secrets."""
_LINES = ("authorization", "cookie", "cookies")
"""Words whose value goes on to the end of the line, as in `Authorization: Basic …`."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# A password may contain `/` and `@`, unless the URL has no `:` before its first `/`. It is
# matched against a word up to its last `@`, so that the time is linear.
_USER = re.compile(r"//(?:[^/]*:.*|[^/?#]*)@")
_SECRET = rf"[\w.-]*(?:{'|'.join(_ENDINGS)})s?"
_SECTION = rf"(?:[\w.-]*[_.-])?(?:{'|'.join(_SECTIONS)})"
_LINE = rf"(?:[\w.-]*[_.-])?(?:{'|'.join(_LINES)})"
_IS = r"\\*[\"'\]]{0,2}\s*(?:={1,2}|:)\s*"
"""Between a name and its value; both may be in quotes, also in those of JSON in JSON."""
_NUMBER = r"\d[\d,.]*(?:[\s)\]};'\"&]|$)"
_COUNT = rf"(?!-*(?:[\w.-]*tokens(?:{_IS}|\s+)|token\s*:\s*){_NUMBER})"
"""Not a number of tokens."""
_FLAG = rf"-(?:{_SECRET}|{_SECTION}|{_LINE})\s+"
_NAMED = rf"(?>{_COUNT}(?:(?:{_SECRET}|{_SECTION}){_IS}|{_FLAG})|bearer\s+)"
_QUOTED = r"""[bfru]{0,2}(?:\\+'[^']*'?|\\+"[^"]*"?|'(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)"""
_NESTED = r"\{(?:[^{}]|\{[^{}]*\})*+\}?|\[(?:[^\[\]]|\[[^\[\]]*\])*+\]?"
_REST = r"""(?:="[^"\n]*"|[^\r\n'"])*+"""
_ASSIGNED = re.compile(
    rf"(?is)(?<=[?&])({_COUNT}{_SECRET}=)([^\s&#'\"]*)"
    rf"|(?<![\w.-])(?:"
    rf"({_NAMED}*+{_LINE}{_IS})({_QUOTED}|{_NESTED}|{_REST})"
    rf"|({_NAMED}(?:{_NAMED}|(?:basic|digest|apikey)\s+)*+)"
    rf"((?:{_QUOTED})++|{_NESTED}|(?:[^\s'\"]|(?<=\w)['\"](?=\w))*+))"
)
"""The value of a URL's parameter, of a header, and of any other name of a secret. No part can fail
after the name, so that the time is linear; a value whose quote is not closed ends with the text."""


def flat_config(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`(key, value)` of a configuration, with dots between levels, and values as JSON."""
    for name, value in section.items():
        if value and is_secret(str(name), value):
            yield f"{prefix}{name}", HIDDEN
        elif isinstance(value, dict) and value:
            yield from flat_config(value, f"{prefix}{name}.")
        else:
            shown = json.dumps(without_secrets(value), default=str, ensure_ascii=False)
            yield f"{prefix}{name}", shown[:MAX_CHARS]


def without_secrets(value: Any) -> Any:
    """A copy of a value of a configuration, such as a section, with `HIDDEN` for each secret."""
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if each and is_secret(str(name), each) else without_secrets(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        names = [None, *value]
        return [
            HIDDEN if _is_flag(name) else without_secrets(each)
            for name, each in zip(names, value, strict=False)
        ]
    return without_credentials(value) if isinstance(value, str) else value


def without_credentials(text: str) -> str:
    """A text without the credentials of its URLs, and without the values of named secrets.

    Example: without_credentials("http://:k@gpu:8001?token=t") == "http://gpu:8001?token=hidden"
    """
    return _ASSIGNED.sub(_hidden, re.sub(r"\S+", _without_user, text))


def shown_value(key: Iterable[str | int], value: object) -> str:
    """The end of a message about the value of a key: empty for a section and for a secret."""
    is_section = isinstance(value, Mapping | list | tuple)
    if is_section or any(is_secret(str(part), value) for part in key):
        return ""
    return f" (value: {without_secrets(value)!r})"


def is_secret(name: str, value: Any = "") -> bool:
    """Whether a key of this name and value must not be shown."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] == "file":
        return False
    is_number = isinstance(value, int | float) and words[-1] != "token"
    if is_number:
        words = [word for word in words if "token" not in word]
    whole = (*_SECTIONS, *_LINES)
    return any(word in whole or word.removesuffix("s").endswith(_ENDINGS) for word in words)


def _without_user(word: re.Match[str]) -> str:
    before, at, after = word[0].rpartition("@")
    return _USER.sub("//", before + at) + after


def _hidden(found: re.Match[str]) -> str:
    name, value = (each for each in found.groups() if each is not None)
    return f"{name}{HIDDEN}" if value else name


def _is_flag(before: Any) -> bool:
    """Whether the argument after this one of a command is a secret: `--api-key`, VALUE."""
    return isinstance(before, str) and before[:1] == "-" and "=" not in before and is_secret(before)


def with_password(url: str, password: str) -> str:
    """The URL with the password, any character of which may be special in a URL."""
    parts = urlsplit(url)
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()


def without_password(url: str) -> str:
    """The URL for people and logs, with the user and without a password, also in its query."""
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}{at}{without_credentials(host)}"
