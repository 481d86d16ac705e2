"""Recognises tool calls that change tests, by their arguments.

Such a call is one of a tool that edits files (`Edit`, `write_file`, `apply_patch`, …) with the path
of a test, or a shell command that writes to one (`>`, `tee`, `sed -i`, `rm`, …).
Reading and running tests is no edit. It is a heuristic: a program that an agent writes can change a
test without naming it. Invariant: the time is linear in the characters that are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

MAX_PATH_CHARS = 1_000
_TEST_NAME = re.compile(
    r"test_.+\.\w+|.+(_test|_spec|\.test|\.spec)\.\w+|conftest\.py"
    r"|\w+Tests?\.(java|kt|cs|swift|php)"
)
_TEST_FOLDERS = {"test", "tests", "__tests__", "spec", "specs"}
_EDITS = re.compile(
    "edit|write|create|replace|patch|insert|update|delete|remove|move|rename", re.IGNORECASE
)
_PATH_KEY = re.compile("path|file|target|dest", re.IGNORECASE)
_READS = {"view", "read", "open", "list"}
"""Values of `command` with which a tool that edits only reads."""
_PATCHED = re.compile(
    r"^(?:\*\*\* (?:Update|Delete|Add) File: |\+\+\+ b/|--- a/)(.+)$", re.MULTILINE
)
_DEPTH = 20
"""Levels of arguments within each other that are read."""
_TOKEN = re.compile(
    r"(?P<end>[|;&\n]+)|(?P<to>\d?>+)"
    r"""|(?P<word>(?:'[^']*(?:'|\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)|[^\s|;&<>'"]+)+)|.""",
    re.DOTALL,
)
"""A part of a shell command. A quotation that does not end takes the rest of the text."""
_WRITERS = {"tee", "rm", "mv", "cp", "truncate", "patch", "unlink", "touch"}
_IN_PLACE = {"sed", "perl", "ruby"}
_GIT_WRITES = {"checkout", "restore", "rm", "mv"}


def edited_test(name: str, arguments: str) -> str | None:
    """The first path of a test that a tool call changes; None if it changes none. Arguments that
    are not JSON are text."""
    try:
        values = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        values = arguments
    edits = _EDITS.search(name) and not (
        isinstance(values, dict) and str(values.get("command", "")) in _READS
    )
    if edits:
        return _first(_named(values))
    return _first(path for _, text in _strings(values) for path in _written(text))


def is_test(path: str) -> bool:
    """Whether a path is in a folder of tests, or named like a test."""
    *folders, name = path[:MAX_PATH_CHARS].strip("/").split("/")
    in_folder = not _TEST_FOLDERS.isdisjoint(folders) or name in _TEST_FOLDERS
    return in_folder or _TEST_NAME.fullmatch(name) is not None


def _first(paths: Iterator[str]) -> str | None:
    return next((path for path in paths if is_test(path)), None)


def _named(values: Any) -> Iterator[str]:
    """The paths that the arguments of an editing tool name."""
    for key, text in _strings(values):
        if _PATH_KEY.search(key):
            yield text
        yield from _PATCHED.findall(text)


def _strings(values: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """The texts of the arguments with their keys; a list of words also as one text."""
    if isinstance(values, str):
        yield key, values
    elif depth == _DEPTH:
        return
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _strings(value, name, depth + 1)
    elif isinstance(values, list):
        for value in values:
            yield from _strings(value, key, depth + 1)
        if values and all(isinstance(value, str) for value in values):
            yield key, " ".join(values)


def _written(text: str) -> Iterator[str]:
    """The paths that a shell command writes to, and those that a patch in it changes."""
    yield from _PATCHED.findall(text)
    words: list[str] = []
    redirected = False
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "end":
            yield from _changed(words)
            words = []
            redirected = False
        elif kind == "to":
            redirected = True
        elif kind == "word":
            word = token[0].strip("'\"")
            if redirected:
                yield word
                redirected = False
            else:
                words.append(word)
    yield from _changed(words)


def _changed(words: list[str]) -> Iterator[str]:
    """The paths that one simple command changes."""
    at = next((n for n, word in enumerate(words) if _program(word)), None)
    if at is None:
        return
    program, rest = words[at].rpartition("/")[2], words[at + 1 :]
    paths = [word for word in rest if not word.startswith("-")]
    flags = [word for word in rest if word.startswith("-") and not word.startswith("--")]
    if program == "cp":
        yield from paths[-1:]
    elif program in _WRITERS or (program in _IN_PLACE and any("i" in flag for flag in flags)):
        yield from paths
    elif program == "git" and paths and paths[0] in _GIT_WRITES:
        yield from paths[1:]


def _program(word: str) -> bool:
    return word.rpartition("/")[2] in _WRITERS | _IN_PLACE | {"git"}
